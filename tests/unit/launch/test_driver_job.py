"""Driver jobs: their batch script, the end of Snakemake with real processes, and what a killed one leaves."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from shardmake.core.errors import ConfigError
from shardmake.launch import driver_job
from shardmake.launch.driver_job import DriverJob, end_snakemake
from shardmake.launch.driver_script import batch_script, lead_seconds, refuse_login_node, remove_locks
from shardmake.launch.slurm_request import leave_job
from shardmake.run.driver_job import DriverDir, DriverState, Workflow, new_driver_dir
from tests.programs import install_programs, write_program
from tests.unit.launch.test_stage_jobs import site
from tests.unit.wording import Wording

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
    sbatch = f"touch {tmp_path}/asked; echo project 7 of 9; echo Submitted batch job 13 on cluster b"  # a site's own
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


def test_an_error_is_reported_if_the_configuration_cannot_be_read(
    job: DriverJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job.workflow = job.workflow.model_copy(update={"config": str(tmp_path / "gone.yaml")})
    job.report("No driver job continues.")
    assert "No driver job continues." in caplog.text


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


def test_the_script_has_what_the_site_requires_of_a_job_without_a_gpu(tmp_path: Path, wording: Wording) -> None:
    folder = DriverDir(tmp_path / "my runs/.driver/001")
    cluster = site(cpu_partition="cpu", cpu_qos="short", setup=["module load python"], driver_memory_gib=2.5)
    wording(batch_script(cluster, "driver-0a1b", folder).replace(sys.executable, "PYTHON"))


def test_a_short_limit_leaves_three_quarters_of_it() -> None:
    assert lead_seconds(site(driver_time_limit="00:02:00").slurm) == 30
    assert lead_seconds(site(driver_time_limit="08:00:00").slurm) == 600


def test_a_job_from_a_job_inherits_nothing_of_it() -> None:
    """These variables change the defaults of sbatch and srun, and make Snakemake's executor pause."""
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "lab", "HOME": "/home/ada", "PATH": "/bin"}
    of_job = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_MEM_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_EXPORT_ENV")
    environment = kept | dict.fromkeys((*of_job, "SLURMD_NODENAME", "SBATCH_MEM_BIND", "CUDA_VISIBLE_DEVICES"), "1")
    leave_job(environment)
    assert environment == kept


def test_a_login_node_of_such_a_site_waits_for_no_job() -> None:
    """Short stages are allowed, and everything where the site allows it."""
    refuse_login_node(site(driver="job"), {"fetch_run", "plan_run", "render_run", "push_run", "report_run"})
    refuse_login_node(site(), {"train_run"})
    with pytest.raises(ConfigError, match=r"jobs of data, train\. .*Run `shardmake submit` with the same arguments"):
        refuse_login_node(site(driver="job"), {"plan_run", "train_run", "data_run"})
