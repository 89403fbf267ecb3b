"""What a job is told of time, and how many questions drivers ask."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardmake.checkpoint.record import CheckpointRecord
from shardmake.checkpoint.store import commit_in_place
from shardmake.config.models import Slurm
from shardmake.core.errors import ShardmakeError
from shardmake.launch import jobs
from shardmake.launch.jobs import SlurmJobs, job_name, lead_seconds, submit_with_retry
from shardmake.launch.slurm_states import JobState, parse_rows
from shardmake.launch.squeue_cache import QueueSnapshot, cached_squeue, run_slurm
from shardmake.run.attempt import AttemptDir
from tests.unit.plans import make_cluster, make_plan


def sealed(run: Path, step: int, seconds: float) -> None:
    checkpoint = run / f"train/checkpoints/checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    record = CheckpointRecord(
        step=step, tokens=1, world_size=2, strategy="zero3", attempt=1, recipe="r", saved_at=0, save_seconds=seconds,
        versions={}, files={},
    )  # fmt: skip
    commit_in_place(checkpoint, record)


@pytest.mark.parametrize(
    ("saves", "limit", "lead"),
    [([], "24:00:00", 120), ([3.0], "24:00:00", 120), ([100.0, 40.0], "24:00:00", 260), ([900.0], "01:00:00", 900),
     ([], "00:02:00", 30), ([10.0], "00:00:30", 15)],
)  # fmt: skip
def test_the_lead_before_the_limit_follows_the_measured_save(
    tmp_path: Path, saves: list[float], limit: str, lead: int
) -> None:
    for step, seconds in enumerate(saves):
        sealed(tmp_path, step, seconds)
    assert lead_seconds(Slurm(time_limit=limit), tmp_path) == lead


def test_the_batch_script_restates_cpus_and_sends_a_wckey_only_where_the_site_wants_one(tmp_path: Path) -> None:
    folder, plan = AttemptDir(tmp_path / "train/attempts/001"), make_plan("zero3")

    def script(**slurm: Any) -> str:
        cluster = make_cluster(executor="slurm", slurm=Slurm(**slurm))
        return SlurmJobs(tmp_path, cluster).script(folder, plan, excluded=["c3"])

    text = script(exclude="c[7-9]")
    (srun,) = [line for line in text.splitlines() if line.startswith("srun ")]
    assert "--cpus-per-task=4" in srun and "--kill-on-bad-exit=1" in srun
    assert "#SBATCH --signal=USR2@120" in text and "#SBATCH --no-requeue" in text
    assert "c[7-9],c3" in text
    assert "wckey" not in text and "#SBATCH --wckey=lab" in script(wckey="lab")


def test_a_job_that_slurm_was_too_busy_to_take_is_submitted_again() -> None:
    passing = ShardmakeError(
        "Slurm refused the job: sbatch: error: Batch job submission failed: Socket timed out on send/recv"
    )
    answers: list[str | ShardmakeError] = [passing, passing, "7"]

    def submit() -> str:
        answer = answers.pop(0)
        if isinstance(answer, ShardmakeError):
            raise answer
        return answer

    def silent() -> str | None:
        raise ShardmakeError("Slurm does not answer")

    assert submit_with_retry(submit, lambda: None, pauses=(0, 0)) == "7"
    answers[:] = [passing, "7"]
    with pytest.raises(ShardmakeError, match="does not answer"):
        submit_with_retry(submit, silent, pauses=(0, 0))
    assert answers == ["7"], "not submitted again while nobody knows whether it was taken"
    answers[:] = [passing]
    assert submit_with_retry(submit, lambda: "6", pauses=(0,)) == "6", "it had taken it all the same"
    answers[:] = [passing, passing]
    with pytest.raises(ShardmakeError, match="Socket timed out"):
        submit_with_retry(submit, lambda: None, pauses=(0,))
    answers[:] = [ShardmakeError("Slurm refused the job: Invalid account"), "8"]
    with pytest.raises(ShardmakeError, match="Invalid account"):
        submit_with_retry(submit, lambda: None, pauses=(0, 0))


@pytest.mark.parametrize(
    ("control", "accounted", "state"),
    [
        ("slurm_load_jobs error: Invalid job id specified", "7|RUNNING|c1|NAME", JobState.GONE),
        ("slurm_load_jobs error: Invalid job id specified", "7|FAILED|c1|NAME", JobState.ENDED),
        ("slurm_load_jobs error: Invalid job id specified", "", JobState.GONE),
        ("slurm_load_jobs error: Unable to contact slurm controller", "7|RUNNING|c1|NAME", JobState.RUNNING),
        ("slurm_load_jobs error: Unable to contact slurm controller", "", JobState.UNKNOWN),
    ],
)
def test_accounting_that_missed_a_jobs_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: str, accounted: str, state: JobState
) -> None:
    def answer(*command: str) -> "subprocess.CompletedProcess[str]":
        if command[0] == "sacct":
            return subprocess.CompletedProcess(command, 0, accounted.replace("NAME", job_name(tmp_path)), "")
        return subprocess.CompletedProcess(command, 1, "", control)

    monkeypatch.setattr(jobs, "run_slurm", answer)
    monkeypatch.setattr(
        jobs, "cached_squeue", lambda _: QueueSnapshot(taken=0, seconds=0, returncode=0, stdout="", stderr="")
    )
    assert SlurmJobs(tmp_path, make_cluster(executor="slurm")).status("7").state is state


def test_a_question_that_cannot_be_asked_is_an_answer_too(tmp_path: Path) -> None:
    program = tmp_path / "squeue"
    program.write_bytes(b"#!/bin/sh\nprintf '7|RUNNING|c1|caf\xe9\\n'\n")
    assert run_slurm(str(program)).returncode == 127, "not executable"
    program.chmod(0o700)
    assert parse_rows(run_slurm(str(program)).stdout)["7"].state is JobState.RUNNING


def test_how_long_an_answer_counts() -> None:
    quick = QueueSnapshot(taken=100, seconds=0.01, returncode=0, stdout="", stderr="")
    assert quick.is_fresh(101.9) and not quick.is_fresh(102.1) and not quick.is_fresh(99)
    slow = quick.model_copy(update={"seconds": 3.0})
    assert slow.is_fresh(159) and not slow.is_fresh(161)
    failed = quick.model_copy(update={"returncode": 1})
    assert failed.is_fresh(109) and not failed.is_fresh(111)


LOOK = """
import sys, time
from pathlib import Path
from shardmake.launch.squeue_cache import cached_squeue
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    assert cached_squeue(["sh", sys.argv[2]], Path(sys.argv[3])).stdout == "7|RUNNING|c1|x\\n"
    time.sleep(0.05)
"""


def test_many_processes_share_one_question(tmp_path: Path) -> None:
    """Six processes ask for two seconds, twenty times a second each; the program behind runs at most twice."""
    program = tmp_path / "program.sh"
    program.write_text(f"echo asked >> {tmp_path}/count; echo '7|RUNNING|c1|x'")
    cached_squeue(["sh", str(program)], tmp_path)
    command = [sys.executable, "-c", LOOK, "1.5", str(program), str(tmp_path)]
    drivers = [subprocess.Popen(command) for _ in range(6)]
    started = time.monotonic()
    assert [driver.wait() for driver in drivers] == [0] * 6
    asked = (tmp_path / "count").read_text().count("asked")
    assert asked <= 2 + (time.monotonic() - started) / 2
