"""Every recipe trains as under DDP, resumes bit for bit, and merges, under every strategy of its row.

Two ranks train four steps. Other tests of strategies: real processes and two nodes (test_strategies.py), NVMe
(test_nvme.py), objectives (test_objectives.py), learning rates (test_rates.py).
"""

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from shardmake.checkpoint import store
from shardmake.checkpoint.record import read_record
from shardmake.config.models import STRATEGIES, Strategy
from shardmake.memory.model import find_frozen
from shardmake.run.paths import RunDir
from tests.activations_on_cpu import COPIED
from tests.composites import COMPOSITES, save_composite
from tests.mixtures import mixture_configs, save_llama, save_mixture
from tests.plan_in_process import plan_in_this_process
from tests.workflow.checkout import Checkout
from tests.workflow.forked import Forked, Trained, log, official_weights, states
from tests.workflow.objectives import settings_of, with_examples

pytestmark = [pytest.mark.training, pytest.mark.usefixtures("loading_in_process")]
HERE = tuple(name for name in STRATEGIES if name not in ("zero3-nvme", "zero3-hpz", "fsdp-hybrid"))
SHARDED = HERE[1:]
Row = tuple[Strategy, int, dict[str, Any]]
"""A strategy, the number of ranks, and settings that the reference under DDP does not have."""


def merges_as_ddp(run: Trained, reference: Trained) -> None:
    """The weights are those of DDP; frozen ones are the base's, bit for bit."""
    merged, before = run.merged(), load_file(run.base / "model.safetensors")
    expected = load_file(reference.last / "model.safetensors")
    torch.testing.assert_close(merged, {name: expected[name] for name in merged}, atol=1e-4, rtol=1e-3)
    for name in find_frozen(before, run.planned[1].freeze):
        assert torch.equal(merged[name], before[name].to(merged[name].dtype)), name


def merges_as_libraries(run: Trained, reference: Trained) -> None:
    """The weights are those of ``save_pretrained`` after the engine's own tools, or PEFT's; every expert changed."""
    model, adapted = AutoModelForCausalLM.from_pretrained(run.base), run.planned[1].method == "lora"
    if adapted:
        run.merged("adapter", adapter=True)
        model = PeftModel.from_pretrained(model, run.rundir.root / "adapter").merge_and_unload()
    else:
        state = official_weights(run.last, run.planned[0].choice.strategy)
        model.load_state_dict({name: tensor[:] for name, tensor in state.items()})
    model.save_pretrained(run.rundir.root / "expected")
    merged, before = run.merged(), load_file(run.base / "model.safetensors")
    expected = load_file(run.rundir.root / "expected/model.safetensors")
    assert merged.keys() == expected.keys() == before.keys()
    torch.testing.assert_close(merged, expected, atol=1e-6 if adapted else 0, rtol=0)
    assert [name for name in merged if ".experts." in name and torch.equal(merged[name], before[name])] == []


def merges_adapters_alone(run: Trained, reference: Trained) -> None:
    """Adapters on 4 bits change their layers as under DDP, up to rounding."""
    merged, before = run.merged(), load_file(run.base / "model.safetensors")
    changed = [name for name, tensor in merged.items() if not torch.equal(tensor, before[name].to(tensor.dtype))]
    assert any("q_proj" in name for name in changed) and not any("norm" in name for name in changed)
    torch.testing.assert_close(merged, reference.merged(), atol=2e-3, rtol=2e-2)


def learns(run: Trained, reference: Trained) -> None:
    assert reference.losses()[4] < reference.losses()[1] - 0.3


def merges_into_composite(run: Trained, reference: Trained) -> None:
    """The towers are the base's, bit for bit; the rest computes as the states that the engine's own tools read."""
    part, (base, model) = run.planned[0].workload.model_class, (run.base, run.rundir.model)
    merged, untouched = run.merged(), load_file(base / "model.safetensors")
    assert merged.keys() == untouched.keys()
    named = ("visual", "vision_tower", "multi_modal_projector")
    towers = {name for name in merged if any(tower in name.split(".") for tower in named)}
    assert towers and {name for name in merged if torch.equal(merged[name], untouched[name])} == towers
    config, own = (json.loads((folder / "config.json").read_text()) for folder in (model, base))
    assert config == own | ({"tie_word_embeddings": False} if part.untied else {})
    assert (model / "preprocessor_config.json").read_bytes() == (base / "preprocessor_config.json").read_bytes()
    trained = part.load(str(base))
    found = {name: tensor[:] for name, tensor in official_weights(run.last, run.planned[0].choice.strategy).items()}
    found.setdefault("lm_head.weight", found["model.language_model.embed_tokens.weight"])  # tied in Gemma 3
    trained.load_state_dict(found)
    opened, info = AutoModelForImageTextToText.from_pretrained(model, output_loading_info=True)
    assert type(opened).__name__ == part.name and not any(info.values())
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        ours, theirs = (one.eval()(input_ids=ids, use_cache=False).logits for one in (opened, trained))
    assert torch.equal(ours, theirs)


@dataclass(frozen=True)
class Recipe:
    """Settings of a run, the strategies that train it, and what is compared."""

    rows: tuple[Strategy | Row, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    base: str = ""
    """A tiny Llama, mixture or composite by its type; empty: the demo's base."""
    unpacked: bool = False
    loss: float = 2e-4
    """Largest difference of a step's loss to DDP's."""
    norm: float | None = None
    """Largest relative difference of a gradient norm to DDP's; None: not compared."""
    repeats: tuple[Strategy, ...] = HERE
    """Strategies whose second half is trained again."""
    killed: bool = False
    """Rank 0 is killed in the save of step 4, and the resumed training must write the same states."""
    merges: Callable[[Trained, Trained], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    logged: tuple[int, ...] = (1, 2, 3, 4)
    quantizes: bool = False
    """The ranks import bitsandbytes, with its kernels for CPUs."""
    quick: tuple[Strategy | Row, ...] | None = None
    """Rows outside of ``tier``; None for all."""
    tier: str = "families"


OFTEN = {"checkpoints": {"every_steps": 2}}
BF16 = {"precision": "bf16", "micro_batch_size": 3, "gradient_checkpointing": True, "learning_rate": 2e-3}
LORA = {"method": "lora"}
FROZEN = {
    "freeze": ["model.embed_tokens", "*.mlp", "model.layers.0", "!model.layers.0.input_layernorm"],
    "scheduler": "constant", "warmup_ratio": 0.0, "max_grad_norm": 1e6, "weight_decay": 0.1,
}  # fmt: skip
HEADS = {"global_batch_size": 8, "learning_rate": 2e-3}
SHARED = HEADS | {"micro_batch_size": 2, "attention": "sdpa"}
RATES = {"learning_rates": {"*.mlp": 1e-2, "lm_head": 1e-4}}
IN_PAIRS = {"sequence_parallel": 2}
PAIRED: tuple[Row, ...] = (
    ("zero2", 4, IN_PAIRS), ("zero1", 2, IN_PAIRS), ("zero3", 2, IN_PAIRS | {"loss": "chunked"}), ("fsdp", 4, IN_PAIRS),
)  # fmt: skip
OTHERS = tuple(name for name in SHARDED if name not in ("zero1", "zero2"))
MIXED = {"learning_rate": 2e-3, "micro_batch_size": 6}
ADAPTED = LORA | {"learning_rate": 1e-2, "micro_batch_size": 6, "lora": {"rank": 4}}
RANK_4 = LORA | {"lora": {"rank": 4}, "learning_rate": 2e-3}
EXPERTS_ALONE = RANK_4 | {"lora": {"rank": 4, "targets": ["experts.gate_up_proj", "experts.down_proj"]}}
BY_EXPERT: Row = ("fsdp", 2, {"expert_parallel": 2})
QUICK: dict[str, tuple[Strategy | Row, ...]] = {
    "qwen2_moe": ("zero1",), "qwen3_moe": ("zero2", BY_EXPERT), "olmoe": ("zero2-offload",), "gpt_oss": ("zero3",),
    "mixtral": ("zero3-offload",), "deepseek_v3": ("fsdp",), "qwen3_5": ("ddp", "zero3"), "gemma3": ("ddp", "fsdp"),
    "mistral3": ("ddp", "zero3"),
}  # fmt: skip
FAMILY = ("ddp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload", "fsdp")
KILLED: dict[str, Any] = {"killed": True, "unpacked": True}
RECIPES = {
    "fp32": Recipe(HERE, {"weight_decay": 0.1}),
    "bf16": Recipe(SHARDED, BF16, loss=6e-3, norm=3e-3, repeats=("zero2", "fsdp")),
    "bf16 lora": Recipe(SHARDED, BF16 | LORA, loss=6e-3, norm=3e-3, repeats=()),
    "lora": Recipe(("zero3", "fsdp"), LORA),
    "lora recomputed": Recipe(("fsdp",), LORA | {"gradient_checkpointing": True}),
    "rmsprop": Recipe(("zero3",), {"optimizer": "rmsprop"}),
    "sgd": Recipe(("zero2",), {"optimizer": "sgd"}),
    # The mean of two or three steps at step 3, the first of which were done before the checkpoint of step 2.
    "mean of steps": Recipe(
        ("zero2", "fsdp"), {"micro_batch_size": 3}, options={"arguments": {"logging_steps": 3}}, logged=(1, 3)
    ),
    "frozen": Recipe(("zero1", "zero2-offload", "zero3", "fsdp", "fsdp-offload"), FROZEN, merges=merges_as_ddp),
    "tensor parallel": Recipe(
        (
            ("zero2", 4, {"tensor_parallel": 2}), ("zero1", 8, {"tensor_parallel": 2, "micro_batch_size": 2}),
            ("zero2", 8, {"tensor_parallel": 4}),
        ), HEADS | {"micro_batch_size": 4}, "llama",
    ),
    "sequence parallel": Recipe(
        (*PAIRED, *((name, 2, IN_PAIRS) for name in OTHERS)), SHARED | RATES, "llama", unpacked=True, norm=2e-3,
        merges=merges_as_ddp, quick=PAIRED, tier="objectives",
    ),
    "sequence parallel lora": Recipe(
        (("fsdp", 2, IN_PAIRS), ("zero3", 2, IN_PAIRS)), SHARED | LORA, "llama", unpacked=True, norm=2e-3, quick=(),
        tier="objectives",
    ),
    "mixture": Recipe(("ddp", "zero2", "zero3", "fsdp"), MIXED, "mixtral", merges=merges_as_libraries),
    "mixture lora": Recipe(("ddp", "zero2", "zero3", "fsdp"), ADAPTED, "mixtral", merges=merges_as_libraries),
    "spread experts": Recipe(
        (
            ("fsdp", 2, {"expert_parallel": 2, "micro_batch_size": 3}), ("fsdp", 4, {"expert_parallel": 2}),
            ("fsdp", 4, {"expert_parallel": 4, "gradient_checkpointing": True}),
        ), {"learning_rate": 2e-3}, "mixtral", merges=merges_as_libraries, repeats=(),
    ),
    "qwen3_moe lora": Recipe(("zero3",), RANK_4, "qwen3_moe", **KILLED),
    "gpt_oss lora": Recipe(("fsdp",), EXPERTS_ALONE, "gpt_oss", **KILLED),
    **{
        # Of Qwen 3, one row more.
        family: Recipe((*FAMILY, *QUICK[family][1:]), {"learning_rate": 2e-3}, family, quick=QUICK[family], **KILLED)
        for family in mixture_configs()
    },
    **{
        kind: Recipe(("ddp", "zero3", "fsdp"), {"learning_rate": 2e-3}, kind, merges=merges_into_composite,
                     quick=QUICK[kind], **KILLED)
        for kind in COMPOSITES
    },
    # The adapters see the same 4-bit weights under every strategy. ZeRO cuts the states of 8-bit Adam into other blocks.
    "qlora": Recipe(
        ("ddp", "zero2", "fsdp"), BF16 | {"method": "qlora"}, loss=6e-3, norm=5e-3, merges=merges_adapters_alone,
        quantizes=True,
    ),
    "adamw8bit": Recipe(
        ("zero2", "zero3"), BF16 | {"optimizer": "adamw8bit"}, loss=0.05, repeats=(), merges=learns, quantizes=True,
    ),
}  # fmt: skip


def rows() -> Iterator[Any]:
    for name, recipe in RECIPES.items():
        for row in recipe.rows:
            strategy, ranks, own = (row, 2, {}) if isinstance(row, str) else row
            what = " ".join((strategy, *([f"{ranks} ranks"] if own else []), *(f"{key}={own[key]}" for key in own)))
            marks = () if recipe.quick is None or row in recipe.quick else getattr(pytest.mark, recipe.tier)
            yield pytest.param(recipe, strategy, ranks, own, id=f"{name}-{what}", marks=marks)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_in_this_process(monkeypatch)


def settings(forked: Forked, recipe: Recipe) -> dict[str, Any]:
    """Return the settings that all rows of ``recipe`` share."""
    base: dict[str, Any] = {}
    if recipe.base:
        folder = forked.checkout.root.with_name(f"base-{recipe.base}")
        base = {"model": str(folder)}
        if not folder.exists():
            make_base(recipe.base, forked.inputs / "base", folder)
    return OFTEN | recipe.settings | base | (forked.unpacked if recipe.unpacked else {})


def make_base(kind: str, demo: Path, folder: Path) -> None:
    if kind == "llama":
        save_llama(demo, folder)
    elif kind in COMPOSITES:
        save_composite(kind, demo, folder)
    else:  # the loss of Mixtral includes that of its routers
        routers = {"output_router_logits": True, "router_aux_loss_coef": 0.1} if kind == "mixtral" else {}
        save_mixture(kind, demo, folder, **routers)


@pytest.mark.parametrize(("recipe", "strategy", "ranks", "own"), rows())
def test_trains_as_ddp_resumes_and_merges(
    request: pytest.FixtureRequest, tmp_path: Path, recipe: Recipe, strategy: Strategy, ranks: int, own: dict[str, Any]
) -> None:
    forked: Forked = request.getfixturevalue("quantizing" if recipe.quantizes else "forked")
    common = settings(forked, recipe)
    reference = forked.once("ddp", options=recipe.options, **common)
    if recipe.killed:
        run = killed_in_a_save(forked, tmp_path, strategy, ranks, **common | own)
    else:
        run = forked.trained(tmp_path, strategy, ranks, recipe.options, **common | own)
    assert tuple(run.losses()) == recipe.logged
    assert run.losses() == pytest.approx(reference.losses(), abs=recipe.loss)
    if recipe.norm:
        assert run.losses("grad_norm") == pytest.approx(reference.losses("grad_norm"), rel=recipe.norm)
    if strategy in recipe.repeats and not recipe.killed:
        run.repeat()
    if recipe.merges:
        recipe.merges(run, reference)


def killed_in_a_save(forked: Forked, folder: Path, strategy: Strategy, ranks: int, **given: Any) -> Trained:
    """Kill rank 0 when all shards of step 4 are written, which the resumed training has to write bit for bit."""
    run = Trained(forked, RunDir(folder / "run"), forked.plan(strategy, ranks, **given))
    kill = {"rank": 0, "folder": str(run.rundir.checkpoints), "log": str(run.rundir.root / "writes.log"),
            "mode": "before", "at": r"os\.rename /\.saving/001/checkpoint-4$"}  # fmt: skip
    codes = forked.train(run.rundir, run.planned, kill)
    assert codes[0] == -signal.SIGKILL, log(run.rundir)
    written = states(read_record(store.staging_folder(run.rundir.checkpoints, 1) / "checkpoint-4"))
    uninterrupted = run.losses()
    assert len(written) > 2
    codes, resumed = forked.resume(run.rundir, run.planned)
    assert set(codes) == {0} and resumed is not None and resumed.step == 2, log(run.rundir)
    assert run.losses() == uninterrupted
    assert states(read_record(run.last)) == written
    return run


def test_a_first_step_changes_no_frozen_weight_and_the_others_as_without_frozen_ones(forked: Forked) -> None:
    common = settings(forked, RECIPES["frozen"]) | {"checkpoints": {"every_steps": 1, "keep": 4}}
    runs = [forked.once("ddp", **common | {"freeze": freeze}) for freeze in (FROZEN["freeze"], [])]
    part, whole = (load_file(run.rundir.checkpoints / "checkpoint-1/model.safetensors") for run in runs)
    base = load_file(forked.inputs / "base/model.safetensors")
    frozen = find_frozen(base, FROZEN["freeze"])
    assert 0 < len(frozen) < len(base)
    for name, tensor in part.items():
        torch.testing.assert_close(tensor, (base if name in frozen else whole)[name].float(), rtol=0, atol=0)
        assert name in frozen or not torch.equal(tensor, base[name])


def test_a_resume_changes_the_degree_of_sequence_parallelism(forked: Forked, tmp_path: Path) -> None:
    common = settings(forked, RECIPES["sequence parallel"])
    run = forked.trained(tmp_path, "zero2", 4, **common | IN_PAIRS)
    uninterrupted = run.losses()
    store.remove(run.last)
    codes, resumed = forked.resume(run.rundir, forked.plan("zero2", 4, **common | {"sequence_parallel": 4}))
    assert codes == [0] * 4 and resumed is not None and resumed.step == 2, log(run.rundir)
    assert run.losses() == pytest.approx(uninterrupted, abs=2e-4)


IN_ENVIRONMENT = {"variables": {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}}
OFFLOAD = {"arguments": {"activation_checkpointing_kwargs": {"use_reentrant": False, "offload": True}}}


@pytest.mark.parametrize(("strategy", "method"), [("zero2", "lora"), ("zero3", "full"), ("fsdp", "full")])
def test_layers_whose_inputs_are_on_the_host_train_the_same(
    forked: Forked, tmp_path: Path, strategy: Strategy, method: str
) -> None:
    """The settings are those that `activation_offload: true` renders; on CPUs the plan refuses the key."""
    options = ({}, IN_ENVIRONMENT if strategy == "fsdp" else OFFLOAD)
    given = {"gradient_checkpointing": True, "method": method}
    kept, offloaded = (forked.trained(tmp_path / str(at), strategy, 2, one, **given) for at, one in enumerate(options))
    assert COPIED in log(offloaded.rundir) and COPIED not in log(kept.rundir)
    assert offloaded.losses() == kept.losses()


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_adapters_of_a_composite_change_their_layers_alone(forked: Forked, tmp_path: Path, strategy: Strategy) -> None:
    """The base's files have other names than its class; the tower has layers of the target's name."""
    lora = LORA | {"lora": {"targets": ["q_proj"]}}
    run = forked.trained(tmp_path, strategy, **settings(forked, RECIPES["gemma3"]) | lora)
    run.merged("adapter", adapter=True)
    merged, untouched = run.merged(), load_file(run.base / "model.safetensors")
    changed = {name for name in merged if not torch.equal(merged[name], untouched[name])}
    assert changed == {name for name in merged if "language_model" in name and "q_proj" in name}
    model = AutoModelForImageTextToText.from_pretrained(run.base)
    theirs = PeftModel.from_pretrained(model, run.rundir.root / "adapter").merge_and_unload().state_dict()
    ours = AutoModelForImageTextToText.from_pretrained(run.rundir.model).state_dict()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_a_composite_learns_preferences_as_under_ddp(forked: Forked, inputs: Path, tmp_path: Path) -> None:
    """DPO, whose reference is a second copy of the text part, under ZeRO-3."""
    own = with_examples("dpo", Forked(Checkout.create(tmp_path / "checkout", inputs), forked.server), inputs)
    base = save_composite("mistral3", own.inputs / "base", tmp_path / "base")
    ddp, zero3 = (own.once(name, model=str(base), **settings_of("dpo")).losses() for name in ("ddp", "zero3"))
    assert len(ddp) == 4 and zero3 == pytest.approx(ddp, abs=1e-4)
