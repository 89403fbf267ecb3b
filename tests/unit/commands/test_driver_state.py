"""Driver jobs: what submit refuses, and status, cancel --driver and logs --driver with programs in the place of Slurm's."""

import os
from pathlib import Path
from typing import Any

import pytest

from shardmake.commands.driver_state import cancel_driver, describe_drivers, driver_jobs, read_driver_log
from shardmake.commands.submit import _check, _options
from shardmake.config.invocation import config_options
from shardmake.config.load import parse_config
from shardmake.core.errors import ConfigError, SlurmError
from shardmake.launch.driver_script import refuse_while_driven
from shardmake.run.driver_job import DriverDir, DriverState, End, Workflow, new_driver_dir
from shardmake.run.paths import RunDir
from tests.programs import install_programs, write_program
from tests.unit.config.samples import RUN
from tests.unit.plans import make_cluster

RUNNING = "12|RUNNING|c1|driver-0a1b"
WAITING = "13|PENDING|(Dependency)|driver-0a1b"
OUTPUT = "Output: runs/.driver/001/driver.log"
CONTINUE = "trainings keep running. Run `shardmake submit` to continue."
REPEAT = "Fix the cause and run `shardmake submit` again."


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the queue; without it, Slurm does not answer."""
    squeue = f'cat {tmp_path}/queue && echo "$@" >> {tmp_path}/asked'
    install_programs(tmp_path, monkeypatch, {"squeue": squeue, "scancel": 'echo "$@"'})
    monkeypatch.chdir(tmp_path)
    return tmp_path / "queue"


def submitted(runs: list[str], end: End | None = None, name: str = "driver-0a1b") -> DriverDir:
    folder = new_driver_dir(Path("runs"))
    values = {"config": "c.yaml", "arguments": [], "offline": True, "lead_seconds": 600}
    Workflow(name=name, user="ada", runs=runs, **values).write(folder.workflow)
    DriverState(jobs=["12"], end=end).write(folder.state)
    return folder


@pytest.mark.parametrize(("queue", "end", "text", "state"), [
    (f"{WAITING}\n{RUNNING}\n", None, "job 12 is running on c1.", "running"),
    (f"{WAITING}\n", "continued", "job 13 is pending (Dependency).", "pending"),
    ("", None, f"job 12 was killed or cancelled; {CONTINUE}", "killed"),
    ("", "cancelled", f"job 12 was cancelled; {CONTINUE}", "cancelled"),
    ("", "failed", f"job 12 ended, because a person is needed. {REPEAT}", "failed"),
    (None, None, "Slurm does not say whether a driver job works on them.", "unknown"),
])  # fmt: skip
def test_status_has_the_driver_job(slurm: Path, queue: str | None, end: End | None, text: str, state: str) -> None:
    if queue is not None:
        slurm.write_text(queue)
    submitted(["chat", "code"], end)
    assert describe_drivers(Path("runs"), ["chat", "other"]) == [f"Driver of chat: {text} {OUTPUT}"]
    (status,) = driver_jobs(Path("runs"), ["chat", "other"]).items()
    assert (status[0], status[1].state) == ("chat", state)


def test_only_the_last_workflow_of_a_run_counts(slurm: Path) -> None:
    slurm.write_text("")
    submitted(["chat", "code"], "failed")
    submitted(["chat"], "done")
    assert [line.partition(":")[0] for line in describe_drivers(Path("runs"), ["chat", "code"])] == ["Driver of code"]


def test_the_driver_jobs_of_all_runs_cost_one_query(slurm: Path) -> None:
    slurm.write_text(f"{RUNNING}\n14|PENDING|(Priority)|driver-ffff\n")
    submitted(["done"], "done", "driver-eeee")
    assert driver_jobs(Path("runs"), ["done"])["done"].state == "done" and not Path("asked").exists()
    submitted(["chat", "code"])
    submitted(["other"], None, "driver-ffff")
    found = driver_jobs(Path("runs"), ["chat", "code", "other", "new"])
    jobs = {run: (status.job, status.nodes) for run, status in found.items()}
    assert jobs == {"other": ("14", "(Priority)"), **dict.fromkeys(("chat", "code"), ("12", "c1"))}
    assert found["code"].log == "runs/.driver/002/driver.log" and len(Path("asked").read_text().splitlines()) == 1


def test_a_second_snakemake_for_the_same_runs_is_refused_with_one_query(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Slurm shows nobody the jobs of others."""
    slurm.write_text(f"{RUNNING}\n")
    refuse_while_driven(Path("runs"), {"chat"})
    submitted(["chat"], "cancelled", "driver-ffff")
    submitted(["chat", "code"])
    submitted(["other"], "done", "driver-eeee")
    refuse_while_driven(Path("runs"), {"other"})
    assert not Path("asked").exists()
    with pytest.raises(ConfigError, match=r"^Driver job 12 of ada \(running\) works on code already\."):
        refuse_while_driven(Path("runs"), {"code", "other"})
    assert len(Path("asked").read_text().splitlines()) == 1
    slurm.write_text("")
    monkeypatch.setenv("PATH", f"{Path('programs').absolute()}:{os.environ['PATH']}")
    write_program(Path("programs/scontrol"), "echo 'PrivateData             = none'")
    refuse_while_driven(Path("runs"), {"code"})
    write_program(Path("programs/scontrol"), "echo 'PrivateData             = jobs,usage'")
    refuse_while_driven(Path("runs"), {"code"})  # root sees every job
    monkeypatch.setenv("LOGNAME", "eve")
    monkeypatch.setattr("os.getuid", lambda: 4321)
    with pytest.raises(
        ConfigError, match=r"^A driver job of ada may work on chat, code, and Slurm shows nobody the jobs"
    ):
        refuse_while_driven(Path("runs"), {"code"})
    slurm.unlink()
    with pytest.raises(SlurmError, match="Slurm does not answer"):
        refuse_while_driven(Path("runs"), {"chat"})


def test_the_driver_job_is_cancelled_and_its_output_is_shown(slurm: Path) -> None:
    rundir = RunDir(Path("runs/chat"))
    slurm.write_text(f"{RUNNING}\n")
    with pytest.raises(ConfigError, match=r"^Nothing to cancel: chat\. It has no driver job\."):
        cancel_driver(rundir)
    folder = submitted(["chat", "code"])
    assert cancel_driver(rundir).startswith("Cancelled driver job 12 of chat, code. Trainings keep running.")
    with pytest.raises(ConfigError, match=r"^No logs: chat\."):
        read_driver_log(rundir, 2)
    folder.log.write_text("one\ntwo\nthree\n")
    assert read_driver_log(rundir, 2) == "==> runs/.driver/001/driver.log\ntwo\nthree"


def test_the_job_gets_the_arguments_without_the_configuration() -> None:
    words = [
        "train", "--profile", "slurm", "--configfile", "a.yaml", "b.yaml", "--config", "x=1", "runs={}",
        "--rerun-triggers", "mtime", "-k",
    ]  # fmt: skip
    assert config_options(words)[1] == ["train", "--profile", "slurm", "--rerun-triggers", "mtime", "-k"]


@pytest.mark.parametrize("words", ["-F", "-f", "-R train_run", "--unlock", "--touch", "-d elsewhere"])
def test_what_a_later_job_must_not_repeat_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be used with submit: a driver job that continues"):
        _options(["--profile", "slurm", *words.split()])


@pytest.mark.parametrize(("to", "targets", "cluster", "refused"), [
    ("hub:lab/chat", [], {}, True), (["file:out", "s3://bucket/chat"], ["push"], {}, True),
    ("hub:lab/chat", ["evaluate"], {}, False), ("file:out", [], {}, False),
    ("hub:lab/chat", [], {"internet_on_compute_nodes": True}, False),
])  # fmt: skip
def test_a_push_of_the_job_is_refused(to: Any, targets: list[str], cluster: dict[str, Any], refused: bool) -> None:
    config = parse_config({"cluster": "c.yaml", "runs": {"chat": RUN | {"push": {"to": to}}}}, "test")
    found = make_cluster(executor="slurm", **cluster)
    if not refused:
        _check(config, found, targets)
        return
    with pytest.raises(ConfigError, match=r"^The driver job cannot push chat to .*Run `shardmake submit evaluate`"):
        _check(config, found, targets)


def test_a_machine_without_slurm_has_nothing_to_submit_to() -> None:
    config = parse_config({"cluster": "c.yaml", "runs": {"chat": RUN}}, "test")
    with pytest.raises(ConfigError, match=r"^There is nothing to submit to: c\.yaml has `executor: local`"):
        _check(config, make_cluster(), [])
