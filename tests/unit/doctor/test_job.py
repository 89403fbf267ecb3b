"""Submission like a training, waiting, and nodes that leave no report."""

import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from shardmake.core.log import warn_while_slow
from shardmake.doctor import job
from shardmake.doctor.records import DoctorDir, NodeFacts, NodeReport
from shardmake.launch.slurm_jobs import training_request
from shardmake.launch.slurm_states import JobState, JobStatus
from shardmake.launch.watcher import PREFIX
from shardmake.run.findings import Verdict, ok
from tests.programs import install_programs
from tests.unit.plans import make_cluster, make_plan

CLUSTER = make_cluster(
    executor="slurm", accelerator="h100", processes_per_node=8, cpus_per_node=96, memory_gib_per_node=1000,
    slurm={
        "partition": "gpu", "account": "lab", "qos": "long", "constraint": "ib", "exclude": "c9", "wckey": "w",
        "gpu_type": "h100", "setup": ["module load cuda"], "extra": {"reservation": "course"}, "time_limit": "01:00:00",
    },
)  # fmt: skip
REQUEST = job.make_request(CLUSTER, 2, build_kernels=True)


def test_the_job_requests_nodes_as_a_training_does(tmp_path: Path) -> None:
    name = job.job_name(DoctorDir(Path("logs/doctor/20261123-101500")))
    ours = job.job_request(REQUEST, name).submitit()
    training = training_request(tmp_path, CLUSTER, make_plan("zero3", processes_per_node=8), []).submitit()
    differ = {name for name in ours.keys() | training.keys() if ours.get(name) != training.get(name)}
    assert differ == {"job_name", "comment", "time", "cpus_per_task", "mem", "srun_args", "signal_delay_s"}
    assert (ours["qos"], ours["setup"]) == ("long", ["module load cuda"])
    assert ours["additional_parameters"] == {"no-requeue": True, "gres": "gpu:h100:8", "reservation": "course"}
    assert (ours["time"], ours["cpus_per_task"], ours["mem"]) == (20, 64, "64GB")
    assert ours["job_name"] == name == "doctor-shardmake-20261123-101500"
    assert not name.startswith(PREFIX), "it does not count as a training of the user"


def test_small_nodes_and_short_limits_are_respected() -> None:
    small = make_cluster(executor="slurm", memory_gib_per_node=0.5, slurm={"time_limit": "00:05:00"})
    ours = job.job_request(job.make_request(small, 1, build_kernels=False), "doctor").submitit()
    assert (ours["time"], ours["cpus_per_task"], ours["mem"]) == (5, 4, "1GB")
    assert ours["additional_parameters"] == {"no-requeue": True}


def test_waiting_logs_each_state_once(caplog: pytest.LogCaptureFixture) -> None:
    pending = JobStatus(JobState.PENDING, "PENDING", "(Priority)")
    running, ended = JobStatus(JobState.RUNNING, "RUNNING", "c1"), JobStatus(JobState.ENDED, "COMPLETED")
    states = iter([pending, pending, JobStatus(JobState.UNKNOWN), running, ended])
    with caplog.at_level("INFO"):
        end = job.wait_for_job("7", lambda _: next(states), poll_seconds=0)
    assert end.name == "COMPLETED" and caplog.messages == ["Job 7 is pending (Priority)", "Job 7 is running c1"]


def test_long_check_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    report = NodeReport(node_rank=0, host="me", findings=[], facts=NodeFacts(), seconds=0.1)

    def check(folder: DoctorDir, rank: int) -> None:
        time.sleep(0.1)
        report.write(folder.report(rank))

    monkeypatch.setattr(job, "check_node", check)
    monkeypatch.setattr(job, "warn_while_slow", lambda what, first: warn_while_slow(what, first / 3000))
    assert job.check_nodes(job.make_request(make_cluster(), 1, build_kernels=True), DoctorDir(tmp_path))[0] == [report]
    assert "compiles DeepSpeed's kernels (not with --skip-builds) (" in caplog.messages[0]


def test_an_interrupt_cancels_the_job_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm may have accepted the job although its id never arrived."""
    calls = tmp_path / "calls"
    install_programs(tmp_path / "bin", monkeypatch, {"scancel": f'echo "$@" >> {calls}'})
    monkeypatch.setattr(job, "submit", Mock(side_effect=KeyboardInterrupt))
    folder = DoctorDir(tmp_path / "20261123-101500")
    with pytest.raises(KeyboardInterrupt):
        job.check_nodes(REQUEST, folder)
    assert calls.read_text().strip().endswith("--name=doctor-shardmake-20261123-101500")
    assert "--user=" in calls.read_text()


@pytest.mark.parametrize(("squeue", "state"), [
    ("echo '7|RUNNING|c1|doctor-shardmake'", JobState.RUNNING),
    ("echo '7|COMPLETED|c1|doctor-shardmake'", JobState.ENDED), ("exit 0", JobState.ENDED),
    ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", JobState.ENDED),
    ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", JobState.UNKNOWN),
])  # fmt: skip
def test_the_state_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, state: JobState) -> None:
    install_programs(tmp_path / "bin", monkeypatch, {"squeue": squeue})
    assert job.query_job("7").state is state


def test_a_node_without_a_report_stops(tmp_path: Path) -> None:
    folder = DoctorDir(tmp_path)
    report = NodeReport(node_rank=0, host="c1", findings=[ok("scratch", "/tmp")], facts=NodeFacts(), seconds=2.0)
    report.write(folder.report(0))
    folder.slurm.mkdir()
    (folder.slurm / "7_0_log.out").write_text("slurmstepd: error: *** STEP 7.0 CANCELLED DUE TO TIME LIMIT ***\n\n")
    reports, (missing,) = job.collect(REQUEST, folder, "7", JobStatus(JobState.ENDED, "TIMEOUT"), seconds=0)
    assert reports == [report] and missing.verdict is Verdict.STOPS
    assert missing.found == "node 1 of job 7 left no report; the job ended as TIMEOUT"
    assert "DUE TO TIME LIMIT" in missing.advice
