"""`shardmake plan --offline`: a plan without Slurm, disk, data and destination."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardmake.cli import app
from shardmake.config.models import Cluster, Run
from shardmake.core.errors import ConfigError
from shardmake.render.stage import render
from shardmake.run.paths import RunDir
from shardmake.run.plan import MemoryEstimates, Plan
from tests.unit.plan.test_planner import EIGHT, gpus

RUN = {
    "model": "base", "data": {"train": "not-here.jsonl"}, "sequence_length": 512, "global_batch_size": 32,
    "max_steps": 10, "learning_rate": 1e-4, "strategy": "zero3", "push": {"to": "hub:our-lab/nothing"},
}  # fmt: skip

NEXT = RUN | {"model": "run:chat", "push": {"to": "hub:our-lab/next"}}


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The output of the command in a folder that has a config.json, and neither data nor Slurm nor room on the disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("shardmake.core.disk.free_space", lambda folder: pytest.fail("the disk was checked"))
    Path("base").mkdir()
    Path("base/config.json").write_text(json.dumps(EIGHT))
    Path("cluster.yaml").write_text(json.dumps(gpus().model_dump(mode="json", exclude_defaults=True)))
    Path("config.json").write_text(json.dumps({"cluster": "cluster.yaml", "runs": {"chat": RUN, "next": NEXT}}))
    return offline("chat")


def offline(run: str) -> str:
    made = CliRunner().invoke(app, ["plan", run, "--offline", "--config", "config.json"])
    assert made.exit_code == 0, made.output
    return made.output


def test_a_plan_away_from_the_cluster(planned: str) -> None:
    rundir = RunDir(Path("runs/chat"))
    plan = Plan.read(rundir.plan)
    assert plan.choice.strategy == "zero3" and "Slurm" in plan.not_checked
    memory, table = MemoryEstimates.read(rundir.memory), rundir.memory_table.read_text()
    assert memory.of(plan.choice).fits and not rundir.stage_settings("plan").exists()
    assert f'<tr style="font-weight: bold"><td>{memory.of(plan.choice).name}<td>' in table
    assert table.count("<tr") == 1 + len(memory.candidates)
    assert "not checked: Slurm, disk space, installed packages, data, " in planned
    assert "On the cluster: shardmake plan chat" in planned


def test_a_run_from_the_model_of_another_is_planned_by_that_runs_base(planned: str) -> None:
    offline("next")
    first, following = (Plan.read(RunDir(Path("runs", name)).plan) for name in ("chat", "next"))
    assert following.choice == first.choice


def test_packages_of_the_run_may_be_missing_here(planned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmake.plan.refusals.find_spec", lambda name: None)
    needing = RUN | {"method": "qlora", "optimizer": "adamw8bit", "loss": "fused", "strategy": "ddp"}
    needing |= {"micro_batch_size": 1, "gradient_checkpointing": True}
    Path("config.json").write_text(json.dumps({"cluster": "cluster.yaml", "runs": {"small": needing}}))
    assert "after an out-of-memory: the training ends, there is no fallback" in offline("small")
    assert Plan.read(RunDir(Path("runs/small")).plan).choice.strategy == "ddp"


def test_nothing_trains_with_such_a_plan(planned: str) -> None:
    rundir = RunDir(Path("runs/chat"))
    with pytest.raises(ConfigError, match=r"--offline, which did not check Slurm.* Make it on the cluster: shardmake"):
        render(Plan.read(rundir.plan), Run(**RUN), Cluster(**gpus().model_dump()), rundir)
