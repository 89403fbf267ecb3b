"""Findings of a node's checks."""

from pathlib import Path

import pytest

from shardmake.core.atomic import write_json
from shardmake.launch.jobs import attempt_settings
from shardmake.launch.preflight import (
    GIB,
    PreflightError,
    check_memory,
    check_names,
    check_node,
    check_scratch,
    check_versions,
)
from shardmake.launch.worker import oom_kills
from shardmake.run.attempt import Attempt, AttemptDir
from shardmake.run.plan import Plan, Resources
from tests.unit.plans import make_cluster, make_plan, make_training_settings


def test_versions_memory_and_scratch(tmp_path: Path) -> None:
    assert check_versions({"torch": "2.13.0"}, {"torch": "2.13.0"}) == []
    assert check_versions({"torch": "2.12.0"}, {"torch": "2.13.0", "peft": "1"}) == [
        "torch is 2.12.0 on this node and 2.13.0 on the login node",
        "peft is not installed on this node and 1 on the login node",
    ]
    assert check_memory(8 * GIB, 8 * GIB) == []
    assert "needs 8.0 GiB of memory, and 7.0 GiB are free" in check_memory(7 * GIB, 8 * GIB)[0]
    assert check_scratch(tmp_path) == []
    assert "cannot be written" in check_scratch(tmp_path / "missing")[0]


def test_a_name_that_does_not_resolve_is_a_warning() -> None:
    assert "node-of-nobody.invalid" in check_names("node-of-nobody.invalid")[0]


def node(tmp_path: Path, host_memory: int = GIB, **changes: object) -> tuple[AttemptDir, Attempt, Plan]:
    """Write a node's folders, for a training that requests more memory than any node has free."""
    plan = make_plan("zero3", nodes=1).model_copy(
        update={"host_memory": host_memory, "resources": {"train": Resources(memory_gib=1 << 20, cpus=2)}}
    )
    folder = AttemptDir(tmp_path / "train/attempts/001")
    make_training_settings(model=str(tmp_path / "base")).write(folder.training)
    write_json(tmp_path / "base/config.json", {})
    write_json(tmp_path / "data/receipt.json", {})
    attempt = attempt_settings(
        1, tmp_path, make_cluster(scratch=str(tmp_path)), plan, resume_from=None, settings_digest="r"
    ).model_copy(update=changes)
    return folder, attempt, plan


def test_a_node_without_findings_is_reported(tmp_path: Path) -> None:
    """The need of the training counts: a job that requests all of a node's memory never finds all of it free."""
    lines: list[str] = []
    check_node(*node(tmp_path), 0, lines.append)
    assert "all checks of this node passed" in lines[-1]


def test_all_findings_are_reported_at_once(tmp_path: Path) -> None:
    folder, attempt, plan = node(tmp_path, host_memory=GIB << 20, versions={"torch": "0.0"})
    (tmp_path / "base/config.json").unlink()
    (tmp_path / "data/receipt.json").unlink()
    with pytest.raises(PreflightError) as error:
        check_node(folder, attempt, plan, 1, print)
    assert not error.value.blames_run
    for words in ("on the login node", "of memory, and", "base/config.json cannot be read", "data/receipt.json"):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("cgroup", "file", "text"),
    [
        (
            "0::/slurm/job_1/step_0\n",
            "slurm/job_1/step_0/memory.events",
            "low 0\noom 2\noom_kill 2\noom_group_kill 0\n",
        ),
        ("5:cpu:/x\n4:memory:/job_1\n0::/\n", "memory/job_1/memory.oom_control", "oom_kill_disable 0\noom_kill 2\n"),
    ],
)
def test_the_kernels_count_of_killed_processes(tmp_path: Path, cgroup: str, file: str, text: str) -> None:
    (tmp_path / "cgroup").write_text(cgroup)
    assert oom_kills(tmp_path / "cgroup", tmp_path) == 0
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    assert oom_kills(tmp_path / "cgroup", tmp_path) == 2
