"""Every key of a section changes what the run does, or it is refused."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shardmake.commands.preview import preview
from shardmake.config.effects import CONTENT_KEYS, KEYS, effect_of
from shardmake.config.methods import METHODS
from shardmake.config.models import Run, Section
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core.errors import ConfigError
from shardmake.plan.refusals import refuse_before_fetch
from shardmake.plan.stage import make_plan as plan_of
from shardmake.render.stage import render_files
from shardmake.run.paths import RunDir
from tests.unit.config.samples import make_run
from tests.unit.plans import LLAMA, make_cluster, make_model, make_plan

OTHER: dict[str, dict[str, Any]] = {
    "lora": {
        "rank": 3, "alpha": 5, "dropout": 0.3, "targets": ["q_proj"], "adapter": "adapters/chat",
        "train_tokens": ["<call>"],
    },
    "dpo": {"beta": 0.7, "reference": "precomputed", "loss_type": ["ipo"]},
    "kto": {"beta": 0.7, "reference": "precomputed", "desirable_weight": 2.0, "undesirable_weight": 3.0},
    "reward": {"center_rewards_coefficient": 0.5},
    "checkpoints": {
        "every_steps": 7, "keep": 9, "keep_best": True, "keep_every_steps": 11, "asynchronous": True,
        "early_stopping": 2,
    },
}  # fmt: skip
"""Another value than the default for each key of the sections that training reads."""


TRAINING: dict[str, Any] = {
    "sequence_length": 512, "packing": None, "global_batch_size": 32, "micro_batch_size": 1, "max_steps": 70,
    "learning_rate": 2e-3, "scheduler": "linear", "scheduler_arguments": {"num_cycles": 0.4}, "warmup_ratio": 0.2,
    "weight_decay": 0.1, "max_grad_norm": 0.5, "optimizer": "adafactor", "precision": "fp16", "gradient_dtype": "fp32",
    "tf32": True, "attention": "eager", "gradient_checkpointing": True, "activation_offload": True, "loss": "chunked",
    "tensor_parallel": 2, "sequence_parallel": 2, "expert_parallel": 2, "nodes": 1, "torch_compile": True, "seed": 1,
    "eval_every_steps": 7, "report_to": ["tensorboard"], "profile": {"first_step": 7}, "memory_snapshot": True,
    "trust_remote_code": True, "freeze": ["model.embed_tokens"], "learning_rates": {"model.norm": 1e-5},
}  # fmt: skip
"""The same for the other keys of a run that its training reads."""
NAMED = {"model", "revision", "resume_from", "epochs", "objective", "method", "strategy", "script", "script_args"}
"""Keys that name what is trained and how, or files, replace another key of the table, or are the driver's."""
NAMED |= {"non_finite", "service_nodes", "service", "deepspeed_config", "accelerate_config", "data"}


def rendered(run: Run) -> str:
    plan = make_plan("zero2")
    workload = plan.workload.model_copy(update={"method": run.method, "objective": run.objective})
    plan = plan.model_copy(update={"workload": workload})
    files = render_files(plan, run, make_cluster(), make_model(), Path("runs/chat/train/attempts/001"))
    return json.dumps([files.accelerate, files.deepspeed, files.training.as_json()], default=str)


def test_the_table_has_every_key_of_its_sections() -> None:
    for section, values in OTHER.items():
        (kind,) = (
            one
            for one in (Run.model_fields[section].annotation, *getattr(Run.model_fields[section].annotation, "__args__", ()))
            if isinstance(one, type) and issubclass(one, Section)
        )  # fmt: skip
        assert set(values) == set(kind.model_fields), f"add the new key of {section} with another value"
        assert all(
            "render" in {*effect_of(f"{section}.{key}").changes, *effect_of(f"{section}.{key}").reads} for key in values
        )


@pytest.mark.parametrize(("objective", "method"), product(OBJECTIVES, METHODS))
def test_each_value_is_rendered_or_refused(objective: str, method: str) -> None:
    base = {"objective": objective, "method": method, "eval_every_steps": 5}
    before, used, refused = rendered(make_run(**base)), set(), set()
    for section, values in OTHER.items():
        for key, value in values.items():
            try:
                run = make_run(**base, **{section: {key: value}})
            except ConfigError as error:
                assert "no effect" in str(error) or "cannot be combined" in str(error), error
                refused.add(f"{section}.{key}")
            else:
                used.add(section)
                assert rendered(run) != before, f"{section}.{key} has no effect with {objective} and {method}"
    sections = {"checkpoints", *(["lora"] if METHODS[method].has_adapters else []), *({objective} & OTHER.keys())}
    assert used == sections
    assert {key.partition(".")[0] for key in refused} - {"lora"} == OTHER.keys() - sections - {"lora"}


def test_the_tables_have_every_key_that_training_reads() -> None:
    read = {key.partition(".")[0] for key in KEYS if "render" in (*effect_of(key).changes, *effect_of(key).reads)}
    content = {key.partition(".")[0] for key in CONTENT_KEYS}
    assert read - {"cluster"} == TRAINING.keys() | OTHER.keys() | NAMED | content


@pytest.mark.parametrize(("strategy", "executor", "trained"), [
    *product(STRATEGY_SPECS, ["slurm"], [{}]), ("zero2", "local", {}), ("zero2", "slurm", {"method": "lora"}),
    *product(["zero2"], ["slurm"], [{"objective": name} for name in OBJECTIVES if name != "sft"]),
])  # fmt: skip
def test_every_value_acts_or_is_refused(
    strategy: str, executor: Any, trained: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmake.launch.jobs.checkout_commit", lambda: "commit")  # each preview asks git twice
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 512}))
    cluster = make_cluster(
        executor=executor, accelerator="a100-80gb", processes_per_node=4, memory_gib_per_node=400.0,
        nvme_gib_per_node=1000.0, max_nodes=2,
    )  # fmt: skip
    base = {"model": str(tmp_path), "strategy": strategy, **trained}
    unchanged = make_run(**base)
    plan = plan_of("chat", unchanged, cluster)[0]
    before = preview(plan, unchanged, cluster, RunDir(tmp_path / "chat"))
    for key, value in (TRAINING | {"nodes": 3 - plan.choice.nodes, "packing": not unchanged.packing}).items():
        try:
            run = make_run(**base, **{key: value})
            refuse_before_fetch(run, cluster)
            is_used = preview(plan, run, cluster, RunDir(tmp_path / "chat")) != before
            is_used = is_used or plan_of("chat", run, cluster)[0] != plan
        except ConfigError:
            continue
        assert is_used, f"{key} has no effect with {strategy}, {executor} and {trained}"


@pytest.mark.parametrize("changes", [
    {"lora": {"rank": 16}, "method": "full"}, {"lora": None}, {"lora": {"rank": 8}, "method": "qlora"},
    {"scheduler": "constant", "warmup_ratio": 0}, {"scheduler": "constant"},
    {"freeze": ["model.embed_tokens", "!*.norm"]},
    {"final_checkpoint": "best", "checkpoints": {"keep_best": True, "early_stopping": 3}},
    {"evaluation": {"lm_eval": ["piqa"], "lm_eval_limit": 5}},
    {"push": {"to": ["file:a", "hub:a/b"], "revision": "x", "pull_request": True}},
    {"script": "t.py", "script_args": ["--lr=$SHARDMAKE_LEARNING_RATE", "${SHARDMAKE_OUTPUT}/x", "$HOME", "$$SHARDMAKE_X", "5$"]},
])  # fmt: skip
def test_keys_with_an_effect_are_accepted(changes: dict[str, Any]) -> None:
    """Those without one are rows of refusals.yaml."""
    make_run(**changes)
