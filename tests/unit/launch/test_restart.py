"""Workers that wait for the driver after their ranks failed, and the driver's decision to restart them in place."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardmake.config.models import Slurm
from shardmake.core.errors import ShardmakeError, StopRequestedError
from shardmake.launch import submission, worker
from shardmake.launch.driver import drive
from shardmake.launch.restart import wait_for_next, waits_for_driver
from shardmake.launch.slurm_states import JobState, JobStatus
from shardmake.launch.training import Training
from shardmake.launch.worker import StopRequest, run_slurm_task
from shardmake.run.attempt import AttemptDir, Heartbeat, NodeHeartbeats
from shardmake.run.attempt_history import load_history
from shardmake.run.attempt_owner import NONE, claim, claim_next, last_in_job, next_in_job
from shardmake.run.plan import Fallback, Plan
from tests.finished_run import make_exit
from tests.unit.launch.fake_run import FakeJobs, FakeRun, fails, write_attempt
from tests.unit.plans import make_plan


@pytest.fixture
def folder(tmp_path: Path) -> AttemptDir:
    """Return an attempt on two nodes whose ranks were killed."""
    folder = AttemptDir(tmp_path / "runs/demo/train/attempts/001")
    attempt = write_attempt(folder, make_plan("zero2"))
    attempt.model_copy(update={"nodes": 2, "restart_in_place": True}).write(folder.settings)
    for node in range(2):
        make_exit(node, phase="training", returncode=1).write(folder.exit_record(node))
    return folder


def change_exit(folder: AttemptDir, **values: Any) -> None:
    make_exit(1, **{"phase": "training", "returncode": 1} | values).write(folder.exit_record(1))


def test_the_workers_wait_for_the_attempt_that_the_driver_chooses(folder: AttemptDir) -> None:
    threading.Timer(0.5, claim_next, (folder, "002")).start()
    assert wait_for_next(folder) == AttemptDir(folder.root.with_name("002"))
    assert last_in_job(folder, "7") == folder, "it belongs to no job"
    claim(folder, "8")
    assert last_in_job(folder, "7") == folder and last_in_job(folder, "8").root.name == "002"


@pytest.mark.parametrize("why", ["time", "stop", "run stop", "decided"])
def test_the_first_decision_counts(folder: AttemptDir, why: str) -> None:
    """Workers that timed out, or must stop, leave no attempt to a driver that answers later."""
    if why == "stop":
        folder.stop_file.touch()
    if why == "run stop":
        folder.read().rundir.stop_file.touch()
    if why == "decided":
        claim_next(folder, NONE)
    assert wait_for_next(folder, 0.3 if why == "time" else 60) is None
    assert claim_next(folder, "002") == NONE


@pytest.mark.parametrize("values", [
    {"returncode": None, "phase": "preflight", "message": "no scratch"}, {"stop_signal": "SIGUSR2"}, {"oom_kills": 1},
    {"phase": "rendezvous", "message": "no answer"},
])  # fmt: skip
def test_nodes_that_cannot_train_on_do_not_wait(folder: AttemptDir, values: dict[str, Any]) -> None:
    assert waits_for_driver(folder)
    change_exit(folder, **values)
    assert not waits_for_driver(folder)
    folder.exit_record(1).unlink()
    assert not waits_for_driver(folder), "before the last node"
    for node in range(2):
        make_exit(node, phase="training", returncode=0).write(folder.exit_record(node))
    assert not waits_for_driver(folder), "after a success"


@pytest.fixture
def stop(tmp_path: Path) -> StopRequest:
    stop = StopRequest.__new__(StopRequest)  # this process keeps its own handlers
    stop.file, stop.signal_name = tmp_path / "first", None
    return stop


def test_a_signal_while_waiting_is_kept(folder: AttemptDir, stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    stop.file = folder.stop_file
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setattr(worker, "main", lambda *_: 1)
    threading.Timer(0.3, stop._on_signal, (signal.SIGUSR2, None)).start()
    assert run_slurm_task(folder.root, stop) is None
    assert [node.later_signal for node in folder.exits()] == [None, "SIGUSR2"] and next_in_job(folder) == NONE


def test_a_signal_between_two_attempts_stops_the_second_one(tmp_path: Path, stop: StopRequest) -> None:
    stop.follow(tmp_path / "second")
    assert not (tmp_path / "second").exists()
    stop._on_signal(10, None)
    stop.follow(tmp_path / "third")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["second", "third"]


ORPHAN = """
import subprocess, sys
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
print(subprocess.Popen(["sleep", "1000"], **quiet).pid, flush=True)
"""
WORKER = f"""
import subprocess, sys, psutil
from shardmake.launch.restart import adopt_orphans, end_descendants
adopt_orphans()
orphan = int(subprocess.run([sys.executable, "-c", {ORPHAN!r}], capture_output=True, check=True).stdout)
assert psutil.pid_exists(orphan)
print(orphan, end_descendants())
"""


def test_a_process_whose_parent_ended_ends_with_the_ranks() -> None:
    printed = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, check=True, text=True).stdout.split()
    assert printed[1] == "True" and not psutil.pid_exists(int(printed[0]))


class RunningJobs(FakeJobs):
    """An executor whose jobs run on until nothing follows in them."""

    def __init__(self, *ends: Callable[[AttemptDir], None], left: float = 10_000.0) -> None:
        super().__init__(*ends)
        self.left = left

    def submit(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> str:
        self.folder = folder
        return claim(folder, super().submit(folder, plan, excluded))

    def status(self, job: str) -> JobStatus:
        """A job ends once its last attempt has ended with nothing to follow; each new attempt ends at once."""
        last = last_in_job(self.folder, job)
        if not last.exits():
            self.ends.pop(0)(last)
        if waits_for_driver(last):
            return JobStatus(JobState.RUNNING, "RUNNING")
        return super().status(job)

    def seconds_left(self, job: str) -> float:
        return self.left


class JobWithSpareNode(RunningJobs):
    """One on three nodes, for two with ranks, from which Slurm removes a node that leaves no exit record."""

    def __init__(self, *ends: Callable[[AttemptDir], None]) -> None:
        super().__init__(*ends)
        self.nodes = ["c1", "c2", "c3"]

    def hosts(self, nodes: str) -> list[str]:
        return self.nodes

    def status(self, job: str) -> JobStatus:
        last = last_in_job(self.folder, job)
        hosts = last.read().hosts or ["c1", "c2"]
        for rank, host in enumerate(hosts):
            beat = Heartbeat(rank=2 * rank, host=host, pid=1, phase="train", step=1, time=0.0)
            NodeHeartbeats(beats=[beat]).write(last.node_heartbeats(rank))
        found = super().status(job)
        if last.count_exits() != 1:
            return found
        self.nodes.remove(hosts[1])
        return JobStatus(JobState.RUNNING, "RUNNING")


def loses_node(folder: AttemptDir) -> None:
    make_exit(0, returncode=1).write(folder.exit_record(0))


def fails_preflight(folder: AttemptDir) -> None:
    make_exit(0, phase="preflight", returncode=None, message="no scratch").write(folder.exit_record(0))
    make_exit(1, returncode=1).write(folder.exit_record(1))


def crashes(folder: AttemptDir) -> None:
    for node in range(folder.read().nodes):
        make_exit(node, returncode=1).write(folder.exit_record(node))


def out_of_memory(folder: AttemptDir) -> None:
    crashes(folder)
    fails("OutOfMemoryError", "CUDA out of memory.")(folder)


def breaks(folder: AttemptDir) -> None:
    crashes(folder)
    fails("ValueError", "bad label")(folder)


KILLED, ERROR, LOST_NODE = "a process was killed", "error in the training", "node failure"


def history(demo: FakeRun, jobs: FakeJobs, *, in_place: bool = True) -> list[tuple[str, str]]:
    """Return job and end of each attempt of a driver that stops with an error."""
    with pytest.raises(ShardmakeError):
        drive(demo.load(jobs, executor="slurm", slurm=Slurm(restart_in_place=in_place)))
    assert all(record.attempt == number for number, record in enumerate(load_history(demo.rundir.attempt_history), 1))
    return [(record.job, record.end) for record in load_history(demo.rundir.attempt_history)]


@pytest.fixture(autouse=True)
def _free_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "cached_squeue", lambda *_: "")


@pytest.mark.parametrize(("jobs", "in_place", "found"), [
    (RunningJobs(*[crashes] * 3), True, [("1", KILLED)] * 3),
    (FakeJobs(*[crashes] * 3), False, [("1", KILLED), ("2", KILLED), ("3", KILLED)]),
    (RunningJobs(crashes, breaks), True, [("1", KILLED), ("1", ERROR)]),
    (RunningJobs(crashes, breaks, left=479), True, [("1", KILLED), ("2", ERROR)]),
], ids=["until the cap", "without the key", "until an error", "not near its limit"])  # fmt: skip
def test_crashes_restart_in_a_job(demo: FakeRun, jobs: FakeJobs, in_place: bool, found: list[tuple[str, str]]) -> None:
    assert history(demo, jobs, in_place=in_place) == found
    assert not in_place or next_in_job(AttemptDir(demo.rundir.attempts / f"{len(found):03d}")) == NONE


@pytest.mark.parametrize(("jobs", "found", "hosts"), [
    (JobWithSpareNode(loses_node, breaks), [("1", LOST_NODE), ("1", ERROR)], ["c1", "c3"]),
    (JobWithSpareNode(loses_node, loses_node, breaks), [("1", LOST_NODE)] * 2 + [("2", ERROR)], ["c1", "c3"]),
    (JobWithSpareNode(fails_preflight, breaks), [("1", "preflight failure"), ("1", ERROR)], ["c2", "c3"]),
    (JobWithSpareNode(crashes, breaks), [("1", KILLED), ("1", ERROR)], ["c1", "c2"]),
], ids=["lost", "two lost", "preflight", "killed"])  # fmt: skip
def test_a_spare_node_takes_over(demo: FakeRun, jobs: FakeJobs, found: list[tuple[str, str]], hosts: list[str]) -> None:
    demo.plan = demo.plan.model_copy(update={"spare_nodes": 1})
    assert history(demo, jobs) == found
    assert AttemptDir(demo.rundir.attempts / "002").read().hosts == hosts


@pytest.mark.parametrize(("node", "task", "hosts", "step", "rank"), [
    ("c1", 0, [], [], 0), ("c3", 2, [], [], None),
    ("c3", 2, ["c1", "c3"], ["c1", "c2", "c3"], 1), ("c2", 1, ["c1", "c3"], [], None),
    ("c5", 1, ["c1", "c3"], ["c4", "c5", "c6"], 1),  # Slurm restarted the job elsewhere
])  # fmt: skip
def test_each_node_knows_its_rank(
    folder: AttemptDir, monkeypatch: pytest.MonkeyPatch, node: str, task: int, hosts: list[str], step: list[str],
    rank: int | None,
) -> None:  # fmt: skip
    monkeypatch.setenv("SLURM_PROCID", str(task))
    monkeypatch.setenv("SLURMD_NODENAME", node)
    monkeypatch.setattr(worker, "step_nodes", lambda: step)
    assert worker.node_rank(folder.read().model_copy(update={"hosts": hosts, "spare_nodes": 1})) == rank


@pytest.mark.parametrize(("memory", "jobs"), [(0, ["1", "1"]), (1, ["1", "2"])])
def test_a_fallback_takes_the_job_unless_it_needs_more_of_it(demo: FakeRun, memory: int, jobs: list[str]) -> None:
    has = demo.plan.resources["train"].memory_gib
    fallback = Fallback(choice=demo.plan.choice, host_memory=1 << 30, memory_gib=has + memory)
    demo.plan = demo.plan.model_copy(update={"fallbacks": [fallback]})
    assert [job for job, _ in history(demo, RunningJobs(out_of_memory, breaks))] == jobs


def test_workers_that_gave_up_get_no_attempt(demo: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(training: Training, folder: AttemptDir, plan: Plan) -> None:
        if folder.root.name == "002":
            claim_next(AttemptDir(folder.root.with_name("001")), NONE)

    monkeypatch.setattr(submission, "_prepare_resume", give_up)
    assert history(demo, RunningJobs(crashes, breaks)) == [("1", KILLED), ("2", ERROR)]


def test_a_stop_while_the_workers_wait_lasts(demo: FakeRun) -> None:
    def stop(folder: AttemptDir) -> None:
        crashes(folder)
        demo.rundir.stop_file.touch()

    with pytest.raises(StopRequestedError):
        drive(demo.load(RunningJobs(stop), executor="slurm", slurm=Slurm(restart_in_place=True)))
