"""A Slurm task that must not work on its attempt ends at once."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from shardmake.launch import slurm_task
from shardmake.launch.rendezvous import Rendezvous
from shardmake.run.attempt import AttemptDir
from shardmake.run.attempt_owner import NOBODY, claim, claim_next
from tests.unit.launch.fake_run import write_attempt
from tests.unit.plans import make_plan


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    (tmp_path / "attempts/001").mkdir(parents=True)
    return AttemptDir(tmp_path / "attempts/001")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the attempts whose worker started; the task is one of job 7."""
    found: list[Path] = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(slurm_task, "run_slurm_task", lambda attempt, stop: found.append(attempt))
    monkeypatch.setattr(slurm_task, "StopRequest", Mock())
    return found


def test_the_first_job_works_on_every_node_and_after_a_restart(attempt: AttemptDir, started: list[Path]) -> None:
    for _ in range(2):
        slurm_task.main(attempt.root)
    assert started == [attempt.root] * 2


def test_a_requeued_job_counts_the_starts_that_it_made_itself(
    tmp_path: Path, started: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node may have published the address of this start before, and the job two addresses before that."""
    folder = AttemptDir(tmp_path / "train/attempts/001")
    write_attempt(folder, make_plan("zero2")).model_copy(update={"again": 2}).write(folder.settings)
    address = Rendezvous(address="10.0.0.1", port=1, interface="ib0", host="c1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for start in range(5):
        started.clear()
        address.write(folder.rendezvous / f"start-{start}.json")
        slurm_task.main(folder.root)
        assert bool(started) is (start < 4)


@pytest.mark.parametrize(("owner", "reason"), [
    ("8", "attempt 001 belongs to job 8, because the sbatch of this one had failed"),
    (NOBODY, "attempt 001 belongs to no job, because the sbatch of this one had failed"),
    ("7", "a later attempt has begun"),
])  # fmt: skip
def test_another_job_leaves_the_attempt(
    attempt: AttemptDir, started: list[Path], capsys: pytest.CaptureFixture[str], owner: str, reason: str
) -> None:
    claim(attempt, owner)
    folder = attempt.root.parent
    if owner == "7":
        (folder / "002").mkdir()
    before = sorted(folder.rglob("*"))
    slurm_task.main(attempt.root)
    assert not started and sorted(folder.rglob("*")) == before
    assert capsys.readouterr().out == f"Job 7 ends without training: {reason}.\n"


def test_a_job_follows_its_attempts_also_after_a_restart_by_slurm(
    attempt: AttemptDir, started: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt chooses the second one while the job runs; a requeued job begins with the last one."""
    second = attempt.root.with_name("002")

    def run(root: Path, stop: object) -> AttemptDir | None:
        started.append(root)
        if root == second:
            return None
        second.mkdir()
        return AttemptDir(root.with_name(claim_next(attempt, "002")))

    monkeypatch.setattr(slurm_task, "run_slurm_task", run)
    slurm_task.main(attempt.root)
    slurm_task.main(attempt.root)
    assert started == [attempt.root, second, second]
