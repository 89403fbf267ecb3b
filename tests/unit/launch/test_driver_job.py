"""The end of Snakemake in a driver job, with real processes, and what a killed one leaves."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from shardmake.launch import driver_job
from shardmake.launch.driver_job import DriverJob, end_snakemake
from shardmake.launch.driver_script import remove_locks
from shardmake.run.driver_job import DriverState, Workflow, new_driver_dir
from tests.programs import install_programs, write_program

SNAKEMAKE = """
import signal, subprocess, sys, time
ends = []
signal.signal(signal.SIGTERM, lambda *_: ends.append(1))
signal.signal(signal.SIGINT, signal.default_int_handler if "interruptible" in sys.argv else signal.SIG_IGN)
children = [subprocess.Popen(["sh", "-c", line]) for line in sys.argv[2:]]
print("ready", flush=True)
try:
    while not (ends and all(child.poll() is not None for child in children)):
        time.sleep(0.05)
except KeyboardInterrupt:
    sys.exit(7)
sys.exit(5)
"""
DRIVER = "./shardmake train demo 2>&1 | cat"
OTHER = "sleep 60"


@pytest.fixture
def shardmake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of this name that runs until a signal ends it."""
    monkeypatch.chdir(tmp_path)
    write_program(tmp_path / "shardmake", "exec 3>&1\nwhile :; do sleep 0.05; done")


def snakemake(*words: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", SNAKEMAKE, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout and process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.usefixtures("shardmake")
@pytest.mark.parametrize(("words", "patience", "status"), [
    (("patient", DRIVER), (60, 60), 5), (("interruptible", DRIVER, OTHER), (1, 60), 7),
    (("stubborn", DRIVER, OTHER), (1, 1), -9),
])  # fmt: skip
def test_drivers_end_first(
    words: tuple[str, ...], patience: tuple[float, float], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snakemake ends by itself after its drivers, is interrupted if something else runs, and is killed at last."""
    process = snakemake(*words)
    monkeypatch.setattr(driver_job, "_PATIENCE", patience[1])
    end_snakemake(process, patience[0])
    assert process.wait(60) == status


@pytest.mark.usefixtures("shardmake")
def test_only_a_killed_snakemake_leaves_locks_and_only_those_of_these_runs_are_removed(tmp_path: Path) -> None:
    locks = tmp_path / ".snakemake/locks"
    locks.mkdir(parents=True)
    (locks / "0.output.lock").write_text("runs/a/plan/plan.json\nruns/a/data/receipt.json\n")
    (locks / "1.output.lock").write_text("runs/ab/plan/plan.json\n")
    remove_locks(["a"])
    assert [lock.name for lock in locks.iterdir()] == ["1.output.lock"]


def ended(command: str = "true") -> "subprocess.Popen[bytes]":
    """A process that has ended already, in place of Snakemake's."""
    process = subprocess.Popen(["sh", "-c", command], start_new_session=True)
    process.wait()
    return process


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DriverJob:
    """Driver job 12 of a workflow below the test's folder, started once."""
    monkeypatch.setattr(driver_job, "_POLL_SECONDS", 0.1)
    folder = new_driver_dir(tmp_path)
    workflow = Workflow(name="driver-0", user="ada", runs=["a"], config="", arguments=[], offline=True, lead_seconds=1)
    DriverState(jobs=[]).write(folder.state)
    return DriverJob(folder, "12", workflow, 0)


def end_of(job: DriverJob) -> str | None:
    return DriverState.read(job.folder.state).end


@pytest.mark.parametrize(("shown", "end", "submitted"), [
    ("JobState=CANCELLED Reason=None\n Restarts=1 PreemptTime=None", "cancelled", False),
    ("JobState=COMPLETING Reason=None\n Restarts=1 PreemptTime=None", "cancelled", False),
    ("JobState=TIMEOUT Reason=None\n Restarts=1 PreemptTime=None", "continued", True),
    ("JobState=COMPLETING Reason=None\n Restarts=1 PreemptTime=2026-11-24T20:00:00", "continued", True),
    ("JobState=COMPLETING Reason=None\n Restarts=2", "continued", False),
])  # fmt: skip
def test_a_job_that_slurm_ends_continues_and_a_cancelled_one_does_not(
    job: DriverJob, shown: str, end: str, submitted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``scontrol show job`` prints ``shown``, as Slurm 22.05 does; the job was restarted once before."""
    sbatch = f"touch {tmp_path}/asked; echo 13"
    install_programs(tmp_path, monkeypatch, {"scontrol": f"echo '{shown}'", "squeue": ":", "sbatch": sbatch})
    job.restarts = 1
    job.stop(ended())
    assert (end_of(job), (tmp_path / "asked").exists()) == (end, submitted)


@pytest.mark.parametrize(("failures", "seconds", "end"), [(2, 600, "continued"), (1000, 0.3, "failed")])
def test_a_job_that_ends_asks_again_while_slurm_does_not_answer(
    job: DriverJob, failures: int, seconds: float, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm preempts the job for good, and its controller is busy; a person must not have to find out later."""
    asked: list[str] = []

    def answer(*words: str) -> "subprocess.CompletedProcess[str]":
        asked.append(words[0])
        if words[0] == "scontrol" and asked.count("scontrol") > failures:
            return subprocess.CompletedProcess(words, 0, "JobState=COMPLETING PreemptTime=2026-11-24T20:00:00", "")
        return subprocess.CompletedProcess(words, 1, "", "Unable to contact slurm controller (connect failure)")

    monkeypatch.setattr(driver_job, "run_slurm", answer)
    monkeypatch.setattr(driver_job, "_ASK_SECONDS", seconds)
    replaced = {"report": Mock(), "next_jobs": list, "submit_next": Mock()}
    for name, function in replaced.items():
        monkeypatch.setattr(job, name, function)
    job.stop(ended())
    assert end_of(job) == end and replaced["submit_next"].call_count == (end == "continued")
    reports = [call.args[0].partition(" `shardmake submit`")[0] for call in replaced["report"].call_args_list]
    assert reports == ["Driver job 12 ends, and Slurm did not answer why. Run"] * (end == "failed")


@pytest.mark.parametrize("command", ["exit 1", "kill -KILL $$"])
@pytest.mark.parametrize(("signalled", "end"), [(True, "cancelled"), (False, "failed")])
def test_a_snakemake_that_scancel_ended_first_has_not_failed(
    job: DriverJob, signalled: bool, end: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal to this process arrives when Snakemake has ended already."""
    shown = "JobState=CANCELLED PreemptTime=None"
    monkeypatch.setattr(driver_job, "run_slurm", lambda *words: subprocess.CompletedProcess(words, 0, shown, ""))
    monkeypatch.setattr(driver_job, "jobs_of", lambda name: {})
    monkeypatch.setattr(job, "start_snakemake", lambda: ended(command))
    job.must_end = signalled
    assert job.run() == 1 and end_of(job) == end
    started = DriverState.read(job.folder.state).snakemake_started
    assert started == (command != "exit 1"), "the next driver job clears up after a kill"
