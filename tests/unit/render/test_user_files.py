"""A user's own DeepSpeed or Accelerate file under a plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardmake.config.models import Strategy
from shardmake.config.user_file_keys import TABLES
from shardmake.core.errors import ShardmakeError
from shardmake.core.nested import leaves, overlay
from shardmake.render.check import Files, Rendering, check_rendered
from shardmake.render.stage import launch_flags, render_files
from shardmake.render.user_files import merge_own_files
from tests.unit.plans import make_cluster, make_model, make_plan, make_run

ZERO2 = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000_000, "round_robin_gradients": True},
    "communication_data_type": "bf16",
}  # fmt: skip
QUESTIONNAIRE = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "FSDP", "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "fsdp_config": {
        "fsdp_version": 2, "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_reshard_after_forward": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_offload_params": False,
        "fsdp_cpu_ram_efficient_loading": True, "fsdp_activation_checkpointing": False,
    },
    "machine_rank": 0, "main_training_function": "main", "mixed_precision": "bf16", "num_machines": 2,
    "num_processes": 4, "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False,
    "tpu_use_sudo": False, "use_cpu": False,
}  # fmt: skip
"""As `accelerate config` writes it."""
HF_ZERO2 = {
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "allgather_partitions": True,
        "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip
"""The sample files of Hugging Face's documentation."""
HF_ZERO3 = HF_ZERO2 | {
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True, "contiguous_gradients": True,
        "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
    }
}  # fmt: skip


def merge(strategy: Strategy, choice: dict[str, Any] | None = None, **settings: Any) -> tuple[Files, list[str]]:
    plan, run = make_plan(strategy, **(choice or {})), make_run(**settings)
    return merge_own_files(render_files(plan, run, make_cluster(), make_model(), Path("plan")), run, plan.choice)


def written(tmp_path: Path, name: str, values: Any) -> str:
    path = tmp_path / name
    path.write_text(json.dumps(values, indent=4) if name.endswith("json") else yaml.safe_dump(values))
    return str(path)


def refusal(strategy: Strategy, **settings: Any) -> list[str]:
    """Return the lines of the error from the first key to the last one."""
    with pytest.raises(ShardmakeError) as error:
        merge(strategy, **settings)
    title, *lines = str(error.value).splitlines()
    assert title == "Your own files contradict the run and its plan:"
    return [line.strip() for line in lines[: next(n for n, line in enumerate(lines) if line.startswith("Change "))]]


def test_what_the_plan_leaves_open_is_taken_over_and_reported(tmp_path: Path) -> None:
    own = written(tmp_path, "ds.json", ZERO2)
    files, changes = merge("zero2", deepspeed_config=own)
    zero = files.deepspeed["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["round_robin_gradients"]) == (500_000_000, True)
    assert files.deepspeed["communication_data_type"] == "bf16"
    assert files.deepspeed["train_micro_batch_size_per_gpu"] == 2
    assert "train_batch_size" not in files.deepspeed
    assert changes == [
        f"{own}: zero_optimization.reduce_bucket_size is 500000000 instead of 4096. The memory estimate counts it.",
        f"{own}: zero_optimization.round_robin_gradients is True. The result is the same.",
        f"{own}: communication_data_type is 'bf16' instead of 'fp32'. Gradients are averaged in this data type.",
    ]
    assert files.training.own_files == {
        "zero_optimization.reduce_bucket_size": 500_000_000, "zero_optimization.round_robin_gradients": True,
        "communication_data_type": "bf16",
    }  # fmt: skip


def test_every_contradiction_is_listed_with_both_values_and_the_winner(tmp_path: Path) -> None:
    values = ZERO2 | {
        "train_batch_size": 99, "gradient_accumulation_steps": "2",
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }  # fmt: skip
    own = written(tmp_path, "ds.json", values)
    assert refusal("zero2", deepspeed_config=own) == [
        f"train_batch_size: 99 in {own}, 16 in the plan. DeepSpeed would have stopped on the product of the others.",
        f"gradient_accumulation_steps: '2' in {own}, 2 in the plan. Transformers would have stopped, once the model "
        "is loaded on every rank.",
        f"zero_optimization.stage: 3 in {own}, 2 in the plan. Your file would have won, and another training than "
        "the planned one would have run.",
        f"zero_optimization.offload_optimizer.device: 'cpu' in {own}, 'none' in the plan. Your file would have won, "
        "and another training than the planned one would have run.",
        "The strategy with the stage and the offload of your file is zero3-offload-optimizer.",
    ]


def test_only_a_script_uses_an_optimizer_of_the_file(tmp_path: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "torch_adam": True}}
    own = written(tmp_path, "ds.json", ZERO2 | {"optimizer": optimizer})
    (line,) = refusal("zero2", deepspeed_config=own)
    assert line.startswith(f"optimizer.type: 'AdamW' and 3 other keys of this section in {own}. The run decides it")
    assert "would decay norms and biases too" in line
    script = tmp_path / "train.py"
    script.write_text("")
    files, lines = merge("zero2", deepspeed_config=own, script=str(script))
    assert files.deepspeed["optimizer"]["params"] == {"lr": 1e-3, "betas": "auto", "torch_adam": True}
    assert f"{own}: optimizer.type is 'AdamW'. The script decides whether it uses this section." in lines


def test_a_script_cannot_use_an_optimizer_that_deepspeed_has_removed(tmp_path: Path) -> None:
    own = written(tmp_path, "ds.json", ZERO2 | {"optimizer": {"type": "onebitlamb"}})
    script = tmp_path / "train.py"
    script.write_text("")
    (line,) = refusal("zero2", deepspeed_config=own, script=str(script))
    assert "DeepSpeed has removed the 1-bit optimizers" in line


def test_the_questionnaires_accelerate_file_fits(tmp_path: Path) -> None:
    own = written(tmp_path, "accelerate.yaml", QUESTIONNAIRE)
    files, changes = merge("fsdp", accelerate_config=own)
    assert files.accelerate == merge("fsdp")[0].accelerate | {"debug": False}
    assert f"{own}: machine_rank is left out. The command line of the launch sets it." in changes
    assert f"{own}: rdzv_backend is left out. 'static' has no effect." in changes


def test_contradictions_of_an_accelerate_file(tmp_path: Path) -> None:
    fsdp = {"fsdp_version": 1, "fsdp_offload_params": True}
    own = written(tmp_path, "a.yaml", QUESTIONNAIRE | {"num_processes": 8, "use_cpu": True, "fsdp_config": fsdp})
    assert [line.split(":")[0] for line in refusal("fsdp", accelerate_config=own)] == [
        "fsdp_config.fsdp_offload_params", "fsdp_config.fsdp_version", "num_processes", "use_cpu",
    ]  # fmt: skip


def test_keys_that_accelerate_refuses_beside_a_deepspeed_file(tmp_path: Path) -> None:
    section = {"gradient_accumulation_steps": 2, "zero3_init_flag": False, "deepspeed_config_file": "mine.json"}
    values = QUESTIONNAIRE | {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    del values["fsdp_config"]
    own = written(tmp_path, "a.yaml", values)
    message = "\n".join(refusal("zero2", accelerate_config=own))
    assert "deepspeed_config.gradient_accumulation_steps: 2" in message
    assert f"mixed_precision: 'bf16' in {own}, not set in the plan. Accelerate would have stopped" in message
    assert "To use that file, name it in the run" in message
    both = QUESTIONNAIRE | {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "mine.json"}}
    del both["fsdp_config"], both["mixed_precision"]
    ours = {
        "accelerate_config": written(tmp_path, "b.yaml", both), "deepspeed_config": written(tmp_path, "d.json", ZERO2),
    }  # fmt: skip
    assert "deepspeed_config_file" not in merge("zero2", **ours)[0].accelerate["deepspeed_config"]


@pytest.mark.parametrize(("name", "text", "words"), [
    ("ds.json", '{"bf16": {"enabled": true}, "bf16": {}}', "the key 'bf16' occurs twice"),
    ("ds.json", '{"bf16": {"enabled": true},}', "line 1 is not valid JSON"), ("ds.json", "[]", "holds no keys"),
    ("ds.json", '{"compute_environment": "LOCAL_MACHINE"}', "looks like an Accelerate file"),
    ("ds.yaml", "a: [", "is not valid YAML"), ("none.json", None, "none.json' does not exist"),
])  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, name: str, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ShardmakeError, match=words):
        merge("zero2", deepspeed_config=str(tmp_path / name))


def test_a_deepspeed_file_needs_a_strategy_of_deepspeed(tmp_path: Path) -> None:
    with pytest.raises(ShardmakeError, match="does not use DeepSpeed"):
        merge("ddp", deepspeed_config=written(tmp_path, "ds.json", ZERO2))


REFUSED_DEEPSPEED: list[tuple[str, Any, str]] = [
    ("scheduler.type", "WarmupLR", "The run decides it (scheduler, warmup_ratio)"),
    ("optimizer.params.betas", [0.9, 0.95], "norms and biases"),
    ("torch_autocast.enabled", True, "would have trained in another one"),
    ("amp.enabled", True, "Set precision in the run"), ("checkpoint.load_universal", True, "could not use them"),
    ("zero_optimization.cpu_offload", True, "The name is deprecated"), ("zero_optimization.stage", 3, "2 in the plan"),
    ("zero_optimization.stage", "2", "2 in the plan"), ("zero_optimization.stage", True, "2 in the plan"),
    ("zero_optimization", True, "A section with keys is needed here"),
    ("zero_optimization.offload_optimizer.device", "cpu", "'none' in the plan"),
    ("zero_optimization.contiguous_gradients", False, "True in the plan"),
    ("zero_optimization.zero_quantized_weights", True, "memory estimate does not know"),
    ("zero_optimization.zero_hpz_partition_size", 8, "1 in the plan. strategy: zero3-hpz sets it"),
    ("zero_optimization.reduce_bucket_size", "2e8", "must be a number"),
    ("zero_optimization.reduce_bucket_size", -1, "must be a number that is not negative"),
    ("zero_optimization.overlap_comm", 1, "must be true or false"),
    ("zero_optimization.reduce_bucket_sise", 1, "Did you mean 'zero_optimization.reduce_bucket_size'?"),
    ("zero_optimization.leaf_module.classes", ["Moe"], "The plan names the blocks with experts"),
    ("zero_optimization.zenflow.topk_ratio", 0.1, "changes what is trained"),
    ("data_types.grad_accum_dtype", "bf16", "'fp32' in the plan"),
    ("activation_checkpointing.cpu_checkpointing", True, "Set gradient_checkpointing in the run"),
    ("tensorboard.enabled", True, "Set report_to in the run"),
    ("curriculum_learning.enabled", True, "Set data.order in the run"),
    ("data_efficiency.data_sampling.curriculum_learning.enabled", True, "Set data.order in the run"),
    ("expert_parallel.autoep_size", 4, "`shardmake consolidate` does not merge"),
    ("optimizer.type", "OneBitAdam", "DeepSpeed has removed the 1-bit optimizers"),
    ("gradient_clipping", 0.5, "1.0 in the plan"), ("gradient_clipping", None, "1.0 in the plan"),
    ("train_batch_size", 64, "16 in the plan"), ("bf16.enabled", False, "True in the plan"),
    ("zero_force_ds_cpu_optimizer", True, "False in the plan"), ("tensor_parallel.autotp_size", 2, "1 in the plan"),
    ("pipeline.stages", 2, "dimensions that work are data (strategy, nodes), tensor (tensor_parallel) and sequence"),
]  # fmt: skip


REFUSED_ACCELERATE: list[tuple[Strategy, str, Any, str]] = [
    ("fsdp", "distributed_type", "MULTI_GPU", "'FSDP' in the plan"), ("fsdp", "num_processes", 8, "4 in the plan"),
    ("fsdp", "use_cpu", True, "The launcher ignores it for the planned engine"),
    ("fsdp", "mixed_precision", "fp16", "'bf16' in the plan"),
    ("zero2", "mixed_precision", "bf16", "it refuses this key beside a DeepSpeed file"),
    ("fsdp", "dynamo_config.dynamo_backend", "INDUCTOR", "The run decides it (torch_compile)"),
    ("fsdp", "dynamo_config.dynamo_mode", "max-autotune", "does not know its effect"),
    ("fsdp", "fsdp_config.fsdp_transformer_layer_cls_to_wrap", "BertLayer", "'LlamaDecoderLayer' in the plan"),
    ("fsdp", "fsdp_config.fsdp_auto_wrap_policy", "NO_WRAP", "counts the blocks of the model as units"),
    ("fsdp", "fsdp_config.fsdp_backward_prefetch", "BACKWARD_PRE", "Only FSDP1 has this setting"),
    ("fsdp", "fsdp_config.offload_params", True, "Did you mean 'fsdp_config.fsdp_offload_params'?"),
    ("fsdp", "fsdp_config", "fsdp.yaml", "A section with keys is needed here"),
    ("zero2", "deepspeed_config", "ds.json", "name it under deepspeed_config of the run"),
    ("zero2", "deepspeed_config.zero_stage", 2, "it refuses this key beside a DeepSpeed file"),
    ("zero3", "deepspeed_config.zero3_init_flag", False, "True in the plan"),
    ("fsdp", "rdzv_backend", "c10d", "always uses a static rendezvous"),
    ("fsdp", "parallelism_config.parallelism_config_tp_size", 2, "not set in the plan"),
    ("fsdp", "megatron_lm_config.megatron_lm_tp_degree", 2, "does not know its effect"),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "kind", "key", "value", "words"), [
    *(("zero2", "deepspeed", *row) for row in REFUSED_DEEPSPEED),
    *((strategy, "accelerate", *row) for strategy, *row in REFUSED_ACCELERATE),
])  # fmt: skip
def test_a_planted_contradiction_is_refused(
    tmp_path: Path, strategy: Strategy, kind: str, key: str, value: Any, words: str
) -> None:
    values = {"deepspeed": {"train_batch_size": "auto"}, "accelerate": {"compute_environment": "LOCAL_MACHINE"}}[kind]
    own = written(tmp_path, f"{kind}.json", overlay(values, {key: value}))
    lines = refusal(strategy, **{f"{kind}_config": own})
    assert lines[0].startswith(f"{key}: {value!r} in {own}")
    assert words in lines[0]


@pytest.mark.parametrize(("strategy", "values"), [("zero2-offload", HF_ZERO2), ("zero3-offload", HF_ZERO3)])
def test_hugging_faces_samples_fit_without_the_refused_sections(
    tmp_path: Path, strategy: Strategy, values: dict[str, Any]
) -> None:
    refused = refusal(strategy, deepspeed_config=written(tmp_path, "ds.json", values))
    sections = [line.partition(".")[0] for line in refused]
    assert sections == ["optimizer", "scheduler"]
    own = written(tmp_path, "ds.json", {key: value for key, value in values.items() if key not in sections})
    _, lines = merge(strategy, deepspeed_config=own)
    assert f"{own}: steps_per_print is left out. Accelerate always turns these lines off." in lines


def test_every_row_of_the_tables_has_a_full_stop() -> None:
    rules = [(key, rule) for table in TABLES.values() for key, rule in table.items()]
    assert [key for key, rule in rules if not rule.effect.endswith(".")] == []
    assert {rule.use for _, rule in rules} == {"planned", "estimated", "result", "neutral", "unused", "refused"}


def test_the_page_about_own_files_names_every_key_of_accelerate_that_is_not_refused() -> None:
    page = Path("docs/how-to/own-files.md").read_text()
    for key, rule in TABLES["accelerate"].items():
        section, _, last = key.rpartition(".")
        name = section if section.startswith(("fsdp_config", "parallelism_config", "deepspeed_config")) else last
        assert rule.use == "refused" or name.replace("dynamo_config", "dynamo_backend") in page, key


EVERYTHING_TAKEN = {
    "zero2": {
        "zero_optimization": {
            "reduce_bucket_size": 1e6, "allgather_bucket_size": 1e6, "overlap_comm": True,
            "round_robin_gradients": True, "ignore_unused_parameters": False, "cpu_offload": False,
        },
        "communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "fp32"}, "steps_per_print": 5,
        "wall_clock_breakdown": True, "memory_breakdown": True, "dump_state": True, "comms_logger": {"enabled": True},
        "torch_autocast": {"enabled": False, "dtype": "bfloat16"}, "checkpoint": {"load_universal": False},
    },
    "zero3-offload": HF_ZERO3 | {
        "optimizer": {}, "scheduler": {}, "zero_optimization": HF_ZERO3["zero_optimization"] | {
            "sub_group_size": 1e4, "stage3_prefetch_bucket_size": 1000, "stage3_param_persistence_threshold": 10,
            "stage3_max_live_parameters": 1e6, "stage3_max_reuse_distance": 1e5, "enable_sanity_checks": True,
            "log_trace_cache_warnings": True,
        },
    },
}  # fmt: skip
"""Files of which every key is taken, by strategy."""


def test_everything_that_is_taken_is_understood(tmp_path: Path) -> None:
    """The libraries' parsers accept the merged files."""
    renderings = []
    for strategy, values in EVERYTHING_TAKEN.items():
        plan = make_plan(strategy)  # type: ignore[arg-type]
        own = written(tmp_path, f"{strategy}.json", values)
        files, _ = merge(strategy, deepspeed_config=own)  # type: ignore[arg-type]
        kept = dict(leaves(files.deepspeed))
        assert not any(key.startswith(("torch_autocast", "checkpoint", "optimizer")) for key in kept)
        flags = launch_flags(plan, Path("plan"), machine_rank=0, address="localhost", port=1)
        renderings.append(Rendering(files, plan.choice, flags))
    check_rendered(renderings, "/tmp")
