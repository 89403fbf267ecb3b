"""Failed ranks start again inside the running job; each training ends with the result of an undisturbed one."""

import signal
from collections.abc import Callable

import psutil
import pytest

from shardmake.core.errors import STOPPED
from tests.cluster import faults as f
from tests.cluster.baseline import BaselineRuns, Ends, Fault, assert_equals_baseline, recover_from
from tests.cluster.fault_run import FaultRun

pytestmark = [pytest.mark.cluster, pytest.mark.training, pytest.mark.faults, pytest.mark.timeout(3600)]
STEPS = {"max_steps": 60}
IN_PLACE = {"slurm": {"restart_in_place": True}} | STEPS


@pytest.fixture(params=["ddp"])
def prepared(run: FaultRun, baseline_run: BaselineRuns, request: pytest.FixtureRequest) -> Callable[[], None]:
    """Configure a run that restarts in place, and return the comparison of its result with an undisturbed one."""
    run.repair()
    baseline = baseline_run(request.param, **STEPS)
    run.configure(request.param, **IN_PLACE)
    return lambda: assert_equals_baseline(run, baseline)


def jobs(run: FaultRun) -> list[str]:
    return [record["job"] for record in run.history()]


@pytest.mark.parametrize(("strategy", "faults", "restarts"), [
    ("ddp", [f.kill_rank, f.kill_rank, f.stop_rank], {1, 2, 3}),
    ("zero3", [f.kill_rank_between_files_of_a_save, f.flip_a_shard, f.kill_worker], {1, 2}),
    ("fsdp", [f.kill_rank_after_a_save, f.preempt, f.kill_node], {1}),
])  # fmt: skip
def test_the_same_job_trains_on_unless_it_lacks_a_node(
    run: FaultRun, baseline_run: BaselineRuns, strategy: str, faults: list[Fault], restarts: set[int]
) -> None:
    """``restarts`` are the attempts after which the ranks start again in place."""
    run.repair()
    baseline = baseline_run(strategy, **STEPS)
    run.configure(strategy, **IN_PLACE)
    recover_from(run, faults, baseline)
    found = jobs(run)
    assert {number for number in range(1, len(found)) if found[number - 1] == found[number]} == restarts, run.log()
    assert len(set(found)) == len(found) - len(restarts)
    ports = [attempt.root / "rendezvous/start-0.json" for attempt in run.attempts()]
    assert len({port.read_text() for port in ports}) == len(found)


@pytest.mark.parametrize("prepared", ["ddp", "zero3", "fsdp"], indirect=True)
def test_ranks_that_have_waited_train_after_each_restart(run: FaultRun, prepared: Callable[[], None]) -> None:
    """A launcher and a rank of each node are the same processes before and after it; none is left at the end."""
    run.start()
    run.slow(2)
    used = set[int]()
    for attempt in (1, 2):
        beat = run.wait_for_steps(run.every, attempt)
        ready = run.wait_for_ready_processes(used)
        assert not any("/sklearn/" in file.path for pid in ready for file in psutil.Process(pid).memory_maps())
        run.send("KILL", beat.pid, beat.host)
        run.wait_for_steps(1, attempt + 1)
        assert ready <= {*run.ready_processes()}, run.log()
        used |= ready
    run.slow(0)
    assert run.wait() == 0, run.log()
    assert {*run.ends()[:2]} <= f.KILLED and run.ends()[2:] == ["finished"] and len(set(jobs(run))) == 1
    assert not run.ready_processes()
    prepared()


def kill_first_node(run: FaultRun, attempts: int) -> Ends:
    run.wait_for_checkpoint(attempts)
    run.cluster.kill_node("c1")
    run.cluster.declare_down("c1")
    return [{"node failure"}]


@pytest.mark.parametrize(
    ("fault", "attempts", "jobs_in_all", "hosts"),
    [(f.kill_node, 2, 1, ["c1", "c3"]), (f.fill_scratch, 3, 1, ["c2", "c3"]), (kill_first_node, 2, 2, [])],
)
def test_a_spare_node_replaces_one_that_is_lost_or_excluded(
    run: FaultRun, baseline_run: BaselineRuns, fault: Fault, attempts: int, jobs_in_all: int, hosts: list[str]
) -> None:
    """Only the loss of the first node, on which Slurm runs the batch script, ends the job."""
    run.repair()
    baseline = baseline_run("ddp", **STEPS)
    run.configure("ddp", slurm={"restart_in_place": True, "spare_nodes": 1}, **STEPS)
    recover_from(run, [fault], baseline)
    assert (len(jobs(run)), len(set(jobs(run)))) == (attempts, jobs_in_all), run.log()
    assert run.attempts()[-1].read().hosts == hosts


def end_ranks(run: FaultRun, attempt: int = 1) -> None:
    """Kill a rank, and wait until the workers of both nodes wait for the driver."""
    beat = run.wait_for_checkpoint(attempt)
    folder = run.attempts()[-1]
    run.send("KILL", beat.pid, beat.host)
    run.cluster.wait_until(lambda: folder.count_exits() == 2, "the ends of both nodes", timeout=200)


@pytest.mark.parametrize(
    ("options", "state", "ends"),
    [([], "CANCELLED", {"cancelled by a person"}), (["--signal=USR2"], "COMPLETED", f.KILLED)],
    ids=["cancelled", "time limit"],
)
def test_a_job_that_must_end_while_it_waits_ends_at_once(
    run: FaultRun, prepared: Callable[[], None], options: list[str], state: str, ends: set[str]
) -> None:
    """A cancelled training stays cancelled. After the signal before a time limit another job resumes."""
    run.start()
    run.slow(0.5)
    run.wait_for_steps(1)
    assert run.driver
    run.driver.send_signal(signal.SIGSTOP)
    end_ranks(run)
    job = run.job()
    run.cluster.run(["scancel", *options, job])
    run.cluster.wait_job(job, state, timeout=30)
    run.slow(0)
    run.driver.send_signal(signal.SIGCONT)
    if not options:
        assert run.wait() == STOPPED, run.log()
        run.start()
    assert run.wait() == 0, run.log()
    assert run.ends()[0] in ends and run.ends()[1:] == ["finished"] and len(set(jobs(run))) == 2
    assert ("received SIGUSR2, which comes before the job's time limit" in run.history()[0]["message"]) == bool(options)
    prepared()


@pytest.mark.parametrize("returns", [True, False])
def test_a_killed_driver_leaves_the_job_for_its_successor_or_to_its_end(
    run: FaultRun, prepared: Callable[[], None], returns: bool
) -> None:
    run.start()
    run.slow(0.5)
    run.wait_for_steps(1)
    f.kill(run)
    end_ranks(run)
    job = run.job()
    if not returns:
        run.cluster.wait_job(job, "COMPLETED", timeout=100)
    run.slow(0)
    run.start()
    assert run.wait() == 0, run.log()
    assert run.ends()[-1] == "finished" and run.ends()[0] in f.KILLED
    assert (jobs(run) == [job, job]) == returns
    prepared()


@pytest.mark.parametrize(("order", "in_place"), [("kill-before-record", True), ("kill-before-claim", False)])
def test_a_driver_that_is_killed_while_it_restarts_the_ranks(
    run: FaultRun, prepared: Callable[[], None], order: str, in_place: bool
) -> None:
    """Its successor adopts the attempt in the running job, or cancels the job, whose attempt was not begun."""
    run.start()
    run.slow(0.5)
    run.wait_for_steps(1)
    run.order(order)
    end_ranks(run)
    assert run.wait() == -9, run.log()
    run.slow(0)
    run.start()
    assert run.wait() == 0, run.log()
    assert run.ends()[0] in f.KILLED and run.ends()[1:] == ["finished"]
    assert (len(set(jobs(run))) == 1) == in_place
    prepared()
