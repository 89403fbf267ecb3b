"""Compare the rendered files of each strategy with golden files, and check invariants of every plan.

The golden files are read by people too. After a change that is meant: UPDATE_GOLDEN=1 pytest tests/unit/render/test_stage.py
"""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.config.models import STRATEGIES, Cluster, Run, Strategy
from shardmake.config.settings import SETTINGS, Setting
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core.disk import remove_swap_files, swap_folder
from shardmake.core.errors import ConfigError
from shardmake.memory.buckets import param_buffer_size
from shardmake.render.check import Files
from shardmake.render.stage import as_yaml, copy_rendered, launch_command, render, render_files
from shardmake.run.attempt import AttemptDir
from shardmake.run.paths import RunDir
from shardmake.run.plan import Choice, Fallback, Plan
from shardmake.run.training_settings import TrainingSettings
from tests.unit.plans import LLAMA, make_cluster, make_model, make_plan, make_run, make_training_settings

GOLDEN = Path(__file__).parent / "golden"
FOLDER = Path("/lab/runs/docs-chat/train/attempts/001")
GPU = {"accelerator": "a100-80gb", "memory_gib_per_node": 512.0}
CASES: dict[str, tuple[Strategy, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    **{strategy: (strategy, {}, {}, GPU) for strategy in STRATEGIES},
    "zero2-fp16-checkpointing": ("zero2", {"precision": "fp16", "gradient_checkpointing": True}, {}, GPU),
    "zero3-cpu": ("zero3", {"precision": "fp32"}, {}, {}),
    "zero1-tensor-parallel": ("zero1", {"tensor_parallel": 2, "gradient_accumulation_steps": 4}, {}, GPU),
    "fsdp-tensor-parallel": ("fsdp", {"tensor_parallel": 2, "gradient_accumulation_steps": 4}, {}, GPU),
    "zero2-activation-offload": ("zero2", {"gradient_checkpointing": True}, {"activation_offload": True}, GPU),
    "fsdp-activation-offload": ("fsdp", {"gradient_checkpointing": True}, {"activation_offload": True}, GPU),
    "fsdp-qlora": ("fsdp", {}, {"method": "qlora"}, GPU), "zero2-qlora": ("zero2", {}, {"method": "qlora"}, GPU),
    "ddp-lora-epochs": ("ddp", {}, {"method": "lora", "max_steps": None, "epochs": 3.0, "warmup_ratio": 1.0}, GPU),
}  # fmt: skip


def case(name: str) -> tuple[Plan, Files]:
    strategy, choice, run, cluster = CASES[name]
    plan = make_plan(strategy, **choice)
    return plan, render_files(plan, make_run(**run), make_cluster(**cluster), make_model(), FOLDER)


def as_text(plan: Plan, files: Files) -> str:
    command = shlex.join(launch_command(plan, FOLDER, machine_rank=1, address="10.0.0.1", port=61000))
    parts = {
        "command on node 1": command.replace(sys.executable, "python") + "\n",
        "accelerate.yaml": as_yaml(files.accelerate), "deepspeed.json": json.dumps(files.deepspeed, indent=2) + "\n",
        "training.json": json.dumps(files.training.as_json(), indent=2) + "\n",
    }  # fmt: skip
    text = "\n".join(f"=== {title}\n{body}" for title, body in parts.items())
    return text.replace(f"shardmake-{os.getuid()}", "shardmake-UID")


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    path = GOLDEN / f"{name}.txt"
    text = as_text(*case(name))
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_golden_files_are_those_of_the_cases() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)


def test_a_setting_of_deepspeed_alone_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Setting("dump", deepspeed=("dump_state",), planned=lambda choice, run: True)
    monkeypatch.setitem(SETTINGS, row.name, row)
    assert case("zero2")[1].deepspeed["dump_state"] is True and "dump_state" not in case("ddp")[1].deepspeed


def test_batch_of_another_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="global_batch_size is 24, but the plan makes 16: 4 ranks x 2 sequences x 2"):
        render(make_plan("ddp"), make_run(global_batch_size=24), make_cluster(), RunDir(tmp_path))
    assert not RunDir(tmp_path).plan_folder.exists()


def test_hybrid_sharding_needs_ranks_to_shard_over(tmp_path: Path) -> None:
    plan = make_plan("fsdp-hybrid", processes_per_node=1, gradient_accumulation_steps=4)
    with pytest.raises(ConfigError, match="one rank a node"):
        render(plan, run_of_model(tmp_path), make_cluster(), RunDir(tmp_path))


def run_of_model(folder: Path, **changes: Any) -> Run:
    """A run whose model is in ``folder``."""
    (folder / "base").mkdir()
    (folder / "base/config.json").write_text(json.dumps(LLAMA))
    return make_run(model=str(folder / "base"), **changes)


def plan_with_fallbacks(*strategies: Strategy) -> Plan:
    plans = [make_plan(strategy) for strategy in strategies]
    fallbacks = [Fallback(choice=plan.choice, host_memory=6 << 30, memory_gib=8) for plan in plans[1:]]
    return plans[0].model_copy(update={"fallbacks": fallbacks})


def test_each_attempt_gets_the_files_that_were_rendered_and_checked(tmp_path: Path) -> None:
    """The driver renders nothing: the choice and every fallback are copied, byte for byte."""
    plan, rundir = plan_with_fallbacks("ddp", "zero2", "zero3-nvme"), RunDir(tmp_path / "docs-chat")
    run, cluster = run_of_model(tmp_path), make_cluster()
    render(plan, run, cluster, rundir)
    for fallback in range(3):
        folder = AttemptDir(rundir.attempts / f"{fallback + 1:03d}")
        copy_rendered(rundir, plan, fallback, folder.root)
        paths, files = [folder.accelerate, folder.deepspeed, folder.training], rundir.rendered_files(fallback)
        assert sorted(folder.root.iterdir()) == paths
        assert [path.read_bytes() for path in paths] == [(files / path.name).read_bytes() for path in paths]
        expected = render_files(plan.at(fallback), run, cluster, make_model(), folder.root)
        assert folder.accelerate.read_text() == as_yaml(expected.accelerate)
        assert json.loads(folder.deepspeed.read_bytes()) == expected.deepspeed
        assert TrainingSettings.read(folder.training) == expected.training
    with pytest.raises(ConfigError, match="belong to another plan"):
        copy_rendered(rundir, make_plan("ddp"), 0, tmp_path)
    for path in (rundir.accelerate, rundir.deepspeed, rundir.training):
        content = path.read_text()
        path.write_text(content + " ")
        with pytest.raises(ConfigError, match=rf"{path.name} was edited .*shardmake render docs-chat"):
            copy_rendered(rundir, plan, 0, tmp_path)
        path.write_text(content)


def test_a_fallback_that_cannot_be_rendered_is_refused_before_the_queue(tmp_path: Path) -> None:
    own = tmp_path / "deepspeed.json"
    own.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    plan, rundir = plan_with_fallbacks("zero2", "zero3"), RunDir(tmp_path / "docs-chat")
    with pytest.raises(ConfigError, match=r"(?s)Cannot render fallback 1 of the plan, zero3 .*zero_optimization.stage"):
        render(plan, run_of_model(tmp_path, deepspeed_config=str(own)), make_cluster(), rundir)
    assert not rundir.plan_folder.exists()


def drawn_choices(**changes: st.SearchStrategy[Any]) -> st.SearchStrategy[Choice]:
    """Draw a choice of any strategy; ``changes`` are further keys or other values."""
    values: dict[str, Any] = {
        "strategy": st.sampled_from(STRATEGIES), "gradient_checkpointing": st.booleans(),
        "micro_batch_size": st.integers(1, 64), "gradient_accumulation_steps": st.integers(1, 64),
        "nodes": st.integers(1, 32), "processes_per_node": st.integers(1, 8),
        "precision": st.sampled_from(["bf16", "fp16", "fp32"]),
    }  # fmt: skip
    return st.builds(Choice, **values | changes)


choices = drawn_choices()
clusters = st.builds(
    make_cluster, accelerator=st.sampled_from(["cpu", "a100-80gb"]), memory_gib_per_node=st.floats(2.0, 4096.0)
)


@given(choice=choices, cluster=clusters, hidden=st.integers(8, 16384))
def test_the_files_agree_on_every_shared_number(choice: Choice, cluster: Cluster, hidden: int) -> None:
    plan = make_plan("ddp").model_copy(update={"choice": choice})
    run = make_run(global_batch_size=choice.global_batch_size)
    model = make_model(hidden_size=hidden * 4)
    files = render_files(plan, run, cluster, model, FOLDER)
    arguments, expected = files.training.arguments, files.training.expected.as_json()
    assert files.accelerate["num_processes"] == expected["world_size"] == choice.world_size
    assert files.accelerate["distributed_type"] == STRATEGY_SPECS[choice.strategy].distributed_type
    assert arguments["per_device_train_batch_size"] == choice.micro_batch_size
    assert bool(files.deepspeed) == (expected["engine"] == "deepspeed")
    if files.deepspeed:
        assert files.deepspeed.get("tensor_parallel", {"autotp_size": 1}) == {"autotp_size": choice.tensor_parallel}
        assert files.deepspeed["train_micro_batch_size_per_gpu"] == arguments["per_device_train_batch_size"]
        assert files.deepspeed["gradient_accumulation_steps"] == arguments["gradient_accumulation_steps"]
        assert files.deepspeed["gradient_clipping"] == arguments["max_grad_norm"]
        assert files.deepspeed["bf16"]["enabled"] == arguments["bf16"]
        assert files.deepspeed["zero_optimization"]["stage"] == expected["zero_stage"]
    if choice.is_fsdp:
        launched = files.accelerate["fsdp_config"]
        assert launched["fsdp_activation_checkpointing"] == choice.gradient_checkpointing
        assert launched["fsdp_version"] == arguments["fsdp_config"]["version"] == expected["fsdp_version"]
    assert TrainingSettings.model_validate_json(files.training.model_dump_json()) == files.training


@given(choice=choices, cluster=clusters, hidden=st.integers(8, 16384))
def test_swap_buffers_hold_the_largest_part_and_fit_the_ram(choice: Choice, cluster: Cluster, hidden: int) -> None:
    choice = choice.model_copy(update={"strategy": "zero3-nvme"})
    plan, model = make_plan("zero3-nvme").model_copy(update={"choice": choice}), make_model(hidden_size=hidden * 4)
    zero = render_files(plan, make_run(), cluster, model, FOLDER).deepspeed["zero_optimization"]
    assert zero["offload_param"]["buffer_size"] * choice.world_size >= model.largest_tensor
    assert param_buffer_size(choice, model) - model.largest_tensor / choice.world_size <= 4096 + 1
    ram = cluster.memory_gib_per_node * 2**30 / choice.processes_per_node
    swapped = 4 * zero["offload_optimizer"]["buffer_count"] * zero["sub_group_size"]
    assert swapped <= max(ram / 8, 16e6)
    assert 2 * zero["offload_param"]["max_in_cpu"] <= ram / 8


def test_swap_files_are_removed_and_nothing_else(tmp_path: Path) -> None:
    cluster = make_cluster(nvme_path=str(tmp_path), accelerator="a100-80gb")
    values = render_files(make_plan("zero3-nvme"), make_run(), cluster, make_model(), FOLDER).deepspeed
    swapped = Path(swap_folder(cluster.nvme_path, "docs-chat", FOLDER), "zero_stage_3/optimizer/rank0/exp_avg.swp")
    others = Path(swap_folder(cluster.nvme_path, "another-run", FOLDER), "kept.swp")
    for path in (swapped, others, tmp_path / "mine/kept.swp"):
        path.parent.mkdir(parents=True)
        path.touch()
    remove_swap_files(values)
    values["zero_optimization"]["offload_param"]["nvme_path"] = str(tmp_path / "mine")
    remove_swap_files(values)
    remove_swap_files({})
    assert sorted(path for path in tmp_path.rglob("*.swp")) == sorted([others, tmp_path / "mine/kept.swp"])


def test_swap_files_of_two_runs_of_one_name_lie_apart() -> None:
    """Each attempt of a run finds what an earlier one left."""
    mine, yours = Path("/home/a/runs/docs-chat"), Path("/home/b/runs/docs-chat")
    folders = [mine / "train/attempts/001", mine / "train/attempts/002", mine / "plan", yours / "train/attempts/001"]
    first, second, planned, other = (swap_folder(make_cluster().nvme_path, "docs-chat", folder) for folder in folders)
    assert first == second == planned != other
    assert swap_folder(None, "docs-chat", folders[0]) == ""


@pytest.mark.parametrize(("schedule", "steps"), [("constant", 0), ("constant_with_warmup", 6)])
def test_only_schedules_with_a_warm_up_get_its_steps(schedule: str, steps: int) -> None:
    arguments = make_training_settings(scheduler=schedule, max_steps=60, warmup_ratio=0.1).arguments
    assert arguments["warmup_steps"] == steps
