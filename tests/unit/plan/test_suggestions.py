import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.choices import MODELS
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core.errors import ShardmakeError
from shardmake.plan.candidates import choices
from shardmake.plan.choose import NothingFitsError, find_choice
from shardmake.plan.planner import Planner
from shardmake.plan.resolve import resolve
from shardmake.plan.stage import choose_run, plan_offline, plan_run
from shardmake.plan.suggestions import Suggestion, changes, levers, suggest, suggestions
from shardmake.run.paths import RunDir
from shardmake.run.plan import MemoryEstimates
from tests.plan_in_process import plan_in_this_process
from tests.unit.plan.test_planner import CPU, EIGHT, SEVENTY, TINY, folders, gpus, run_of
from tests.unit.plans import LLAMA, make_cluster, make_plan, make_run

__all__ = ["folders"]


def test_the_smallest_change_of_each_setting_is_suggested() -> None:
    enough = {"nodes": 8, "method": "qlora", "sequence_length": 512}

    def outcome(setting: str, value: int | str) -> str | None:
        helps = {
            "nodes": lambda: value >= 8, "sequence_length": lambda: value <= 600, "method": lambda: value != "lora",
        }  # fmt: skip
        return "fits" if helps[setting]() else None

    found = suggestions(changes(2, 2048, "full", "sgd"), outcome)
    assert found == [Suggestion(setting, value, "fits") for setting, value in enough.items()]
    assert suggestions(changes(2, 2048, "lora", "adamw"), lambda setting, value: None) == []


def test_the_plan_suggests_single_changes_if_nothing_fits(folders: dict[str, str], tmp_path: Path) -> None:
    run = run_of(folders["eight"], strategy="ddp", nodes=1, global_batch_size=64)
    with pytest.raises(ShardmakeError) as caught:
        plan_run(run, gpus(), RunDir(tmp_path / "chat"))
    said = str(caught.value)
    assert "Strategy ddp does not fit" in said
    assert re.search(r"\n  strategy: auto \(zero\S+, .*, 1 node: .* of 79.1 GiB per GPU.*, [0-9.]+ s per step\)", said)
    assert "\n  method: lora (ddp, no checkpointing, micro batch 8, 1 node: " in said
    assert "nodes:" not in said, "ddp shards nothing"
    assert "the cheapest first:\n  strategy: auto" in said
    rundir = RunDir(tmp_path / "chat")
    refused = MemoryEstimates.read(rundir.memory)
    assert {item.choice.strategy for item in refused.candidates} == {"ddp"}
    assert not any(item.fits for item in refused.candidates) and not rundir.plan.exists()


def test_a_precomputed_reference_is_the_cheapest_change_if_two_models_do_not_fit(folders: dict[str, str]) -> None:
    """Changes that the objective refuses, such as a fused loss or QLoRA, are not suggested."""
    settings = {"objective": "dpo", "packing": False, "strategy": "zero3", "nodes": 1, "gradient_checkpointing": True}
    run = run_of(folders["eight"], micro_batch_size=4, **settings)
    with pytest.raises(NothingFitsError) as caught:
        choose_run(run, gpus(processes_per_node=2))
    found = suggest(caught.value.settings)
    assert (found[0].setting, found[0].value) == ("dpo.reference", "precomputed")
    assert not {"loss", "sequence_parallel"} & {one.setting for one in found}
    assert ("method", "qlora") not in {(one.setting, one.value) for one in found}


def test_without_a_change_that_fits_the_plan_says_so(folders: dict[str, str], tmp_path: Path) -> None:
    """A node's RAM is too small for the processes alone."""
    with pytest.raises(NothingFitsError, match=r"available\. No single change of the run fits\. Change several"):
        plan_run(run_of(folders["eight"]), gpus(memory_gib_per_node=1.0), RunDir(tmp_path / "chat"))


def test_a_traced_model_gets_planned_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are what does not fit."""
    plan_in_this_process(monkeypatch)
    config = {**TINY, "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "vocab_size": 2_000_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    named = {"strategy": "ddp", "sequence_length": 128, "nodes": 1, "method": "qlora", "activation_offload": True}
    run = run_of(str(tmp_path), **named, micro_batch_size=64, global_batch_size=64)
    settings = resolve(run, gpus(processes_per_node=1, max_nodes=1))
    assert {one.setting: one.value for one in suggest(settings)} == {"loss": "fused", "micro_batch_size": "auto"}


def test_a_refused_plan_keeps_the_memory_of_an_earlier_one(folders: dict[str, str], tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "chat")
    plan_run(run_of(folders["tiny"], strategy="ddp"), CPU, rundir)
    before = rundir.memory.read_bytes()
    with pytest.raises(ShardmakeError, match="does not fit"):
        plan_run(run_of(folders["eight"], strategy="ddp", nodes=1), gpus(executor="local"), rundir)
    assert rundir.memory.read_bytes() == before


def test_a_fused_loss_is_the_cheapest_change_for_long_sequences(tmp_path: Path) -> None:
    """The logits of 131,072 tokens take 188 GiB; the package need not be installed to be suggested."""
    (tmp_path / "config.json").write_text(json.dumps(EIGHT | {"max_position_embeddings": 131072}))
    run = run_of(str(tmp_path), sequence_length=131072, global_batch_size=8, nodes=1)
    with pytest.raises(NothingFitsError) as caught:
        choose_run(run, gpus())
    assert list(levers(caught.value.settings)) == [
        ("loss", ["fused", "chunked"]), ("sequence_parallel", [2, 4, 8]), ("tensor_parallel", [2, 4, 8]),
        ("activation_offload", [True]),
    ]  # fmt: skip
    first = suggest(caught.value.settings)[0]
    assert (first.setting, first.value) == ("loss", "fused")
    assert "GiB per GPU" in first.outcome and " s per step" in first.outcome
    if find_spec("liger_kernel") is None:
        assert first.outcome.endswith("; needs pip install liger-kernel")


def test_what_the_run_fixed_is_advice_and_not_planned(folders: dict[str, str], tmp_path: Path) -> None:
    fixed = {"strategy": "zero3-offload", "micro_batch_size": 1}
    run = run_of(folders["eight"], sequence_length=2048, global_batch_size=64, **fixed)
    plan = plan_offline(run, gpus(), RunDir(tmp_path / "chat"))
    assert (plan.choice.strategy, plan.choice.micro_batch_size) == ("zero3-offload", 1)
    advice = next(line for line in plan.advice if line.startswith("without offload: strategy: auto ("))
    assert " s per step against " in advice and "GiB per GPU" in advice


def test_an_offload_is_avoided_by_two_changes_where_neither_is_enough(tmp_path: Path) -> None:
    """32B at 16,384 tokens on eight H100: neither 8-bit AdamW nor a loss without whole logits is enough alone."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["32B"]))
    run = run_of(str(tmp_path), sequence_length=16384, global_batch_size=64)
    plan = plan_offline(run, gpus(max_nodes=1), RunDir(tmp_path / "chat"))
    assert plan.choice.strategy == "zero3-offload-optimizer"
    assert any(line.startswith("without offload: optimizer: adamw8bit, loss: fused (zero3, ") for line in plan.advice)


def test_triton_s_losses_are_not_suggested_before_ampere(folders: dict[str, str]) -> None:
    for name, losses in (("a100-80gb", ["fused", "chunked"]), ("v100-32gb", ["chunked"])):
        settings = resolve(run_of(folders["eight"]), gpus(accelerator=name))
        assert ("loss", losses) in levers(settings)


def test_a_loss_without_whole_logits_is_advice_where_they_are_the_peak(folders: dict[str, str], tmp_path: Path) -> None:
    """One H100 with an 8B LoRA held 4.5 GiB more than TRL, whose default loss makes logits in parts."""
    sizes = {"sequence_length": 4096, "global_batch_size": 2, "micro_batch_size": 1}
    run = run_of(folders["eight"], method="lora", strategy="ddp", **sizes)
    one = gpus(processes_per_node=1, max_nodes=1)
    plan = plan_offline(run, one, RunDir(tmp_path / "chat"))
    (line,) = [line for line in plan.advice if line.startswith("less GPU memory: loss: chunked (ddp, ")]
    smaller, larger = re.search(r": ([\d.]+) of .* and ([\d.]+) of ", line).groups()  # type: ignore[union-attr]
    assert 3 < float(larger) - float(smaller) < 8
    chunked = plan_offline(run.model_copy(update={"loss": "chunked"}), one, RunDir(tmp_path / "other"))
    assert not any("loss" in line for line in chunked.advice)
    compiled = "may take less GPU-time: torch_compile: True ("
    assert any(line.startswith(compiled) for line in plan.advice), "the model of the step does not know its gain"
    assert not any("torch_compile" in line for line in chunked.advice), "the two exclude each other"


def test_shared_matrices_are_planned_with_a_rank_s_part(tmp_path: Path) -> None:
    """70B with ZeRO-2 on four nodes: a rank's gradients fit only if eight ranks share each matrix."""
    (tmp_path / "config.json").write_text(json.dumps(SEVENTY))
    run = run_of(str(tmp_path), sequence_length=4096, global_batch_size=32, nodes=4, strategy="zero2")
    large = gpus(memory_gib_per_node=2000)  # each rank loads the whole model before it takes its part
    with pytest.raises(NothingFitsError) as caught:
        choose_run(run, large)
    found = {one.setting: one for one in suggest(caught.value.settings)}
    assert found["tensor_parallel"].value == 8 and "zero2, checkpointing" in found["tensor_parallel"].outcome
    shared = run.model_copy(update={"tensor_parallel": 8})
    assert choose_run(shared, large).chosen.choice.tensor_parallel == 8


@pytest.mark.parametrize("key", ["sequence_parallel", "tensor_parallel"])
def test_a_group_is_one_data_parallel_rank(key: str, tmp_path: Path) -> None:
    choice = make_plan("zero1", **{key: 2}).choice
    assert (choice.world_size, choice.data_parallel, choice.global_batch_size) == (4, 2, 8)
    assert choice.readers == "2 groups of 2 ranks"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    run = make_run(model=str(tmp_path), packing=False, **{key: 2})
    found = list(choices(resolve(run, make_cluster(processes_per_node=4))))
    assert {item.global_batch_size for item in found} == {16} and {item.data_parallel for item in found} == {2}
    able = {name for name, spec in STRATEGY_SPECS.items() if getattr(spec, key) and spec.cpu and spec.is_deepspeed}
    assert {item.strategy for item in found} == able >= {"zero1", "zero2"}


@pytest.mark.parametrize(("config", "tokens", "nodes"), [(EIGHT, 131072, 1), (SEVENTY, 32768, 4)], ids=["8B", "70B"])
def test_long_sequences_fit_with_it(tmp_path: Path, config: dict[str, Any], tokens: int, nodes: int) -> None:
    """8B at 131,072 tokens on 8 H100, and 70B at 32,768 on 32: the refusal without it names it, and it fits."""
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131072}))
    run = run_of(str(tmp_path), sequence_length=tokens, nodes=nodes)
    with pytest.raises(NothingFitsError) as caught:
        choose_run(run, gpus())
    [(setting, values)] = [lever for lever in levers(caught.value.settings) if lever[0] == "sequence_parallel"]
    planners = (Planner(resolve(run.model_copy(update={setting: size}), gpus())) for size in values)
    fitting = [size for size, planner in zip(values, planners, strict=True) if find_choice(planner)]
    assert fitting == ([4, 8] if config is EIGHT else [2, 4, 8])
