"""Trainings on the three-node Slurm that something is done to; each must end as the one that was left in peace."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.consolidate_limits import cgroup, may_limit
from shardmake.run.plan import Plan
from tests.cluster.harness import STATE, Cluster
from tests.cluster.lab import FaultLab, make_lab
from tests.cluster.peace import STRATEGIES, Ends, Fault, Peace, assert_as_in_peace, survive

pytestmark = [pytest.mark.cluster, pytest.mark.training, pytest.mark.timeout(1800)]
CHANCE = random.Random(7)


# ---- faults: each is done to a training under way, and names the ends it may lead to, attempt by attempt -------------


def kill_rank(lab: FaultLab, attempts: int) -> Ends:
    beat = lab.wait_for_steps(CHANCE.randint(2, 15), attempts)
    lab.send("KILL", beat.pid, beat.host)
    return [{"a process was killed", "communication failure"}]


def kill_worker(lab: FaultLab, attempts: int) -> Ends:
    beat = lab.wait_for_steps(CHANCE.randint(2, 15), attempts)
    lab.send("KILL", lab.parent(beat, 2), beat.host)
    return [{"a process was killed", "communication failure", "unknown"}]


def stop_rank(lab: FaultLab, attempts: int) -> Ends:
    beat = lab.wait_for_steps(CHANCE.randint(2, 15), attempts)
    lab.send("STOP", beat.pid, beat.host)
    return [{"hang"}]


def rank_sleeps(lab: FaultLab, attempts: int) -> Ends:
    lab.wait_for_steps(2, attempts)
    lab.order("sleep")
    return [{"hang"}]


def kill_node(lab: FaultLab, attempts: int) -> Ends:
    beat = lab.wait_for_steps(CHANCE.randint(2, 15), attempts)
    lab.cluster.kill_node(beat.host)
    lab.cluster.declare_down(beat.host)
    return [{"node failure"}]


def cut_link(lab: FaultLab, attempts: int) -> Ends:
    beat = lab.wait_for_steps(CHANCE.randint(2, 15), attempts)
    lab.cluster.cut(beat.host)
    return [{"node failure", "hang", "communication failure"}]


def signals_before_the_limit(lab: FaultLab, attempts: int) -> Ends:
    """USR2 as Slurm sends it, twice, and on one node SIGTERM as well, a moment later."""
    beat = lab.wait_for_steps(CHANCE.randint(2, 15), attempts)
    (job,) = [job.id for job in lab.checkout.training_jobs() if job.state == "RUNNING"]
    worker = lab.parent(beat, 2)
    for _ in range(2):
        lab.cluster.run(["scancel", "--signal=USR2", job])
    lab.cluster.run(["sh", "-c", f"sleep 0.3; kill -TERM {worker} || true"], node=beat.host)
    return [{"time limit"}]


def end_of_time(lab: FaultLab, attempts: int) -> Ends:
    """The limit itself, moved to now."""
    lab.wait_for_steps(CHANCE.randint(2, 15), attempts)
    (job,) = [job.id for job in lab.checkout.training_jobs() if job.state == "RUNNING"]
    lab.cluster.run(["scontrol", "update", f"jobid={job}", "endtime=now"])
    return [{"time limit"}]


def preempt(lab: FaultLab, attempts: int) -> Ends:
    lab.wait_for_steps(2, attempts)
    out = lab.checkout.root / "urgent.out"
    urgent = lab.cluster.run(
        f"sbatch --parsable --partition=urgent --nodes=3 --exclusive --output={out} --wrap 'sleep 600'"
    ).stdout.strip()
    lab.cluster.wait_job(urgent, "RUNNING", timeout=90)
    lab.cluster.run(["scancel", urgent])
    return [{"preempted"}]


def restart_controller(lab: FaultLab, attempts: int) -> Ends:
    lab.wait_for_steps(2, attempts)
    lab.cluster.stop_controller()
    lab.wait_for_steps(15, attempts)
    lab.cluster.run(["slurmctld"])
    return []


def kill_waiting_driver(lab: FaultLab, attempts: int) -> Ends:
    lab.wait_for_steps(2, attempts)
    kill_driver(lab)
    lab.start()
    lab.cluster.wait_until(lambda: "Adopting job" in lab.log(), "adoption")
    return []


def kill_driver(lab: FaultLab) -> None:
    assert lab.driver
    lab.driver.kill()
    lab.driver.wait()


def unfit_node(lab: FaultLab, attempts: int) -> Ends:
    """A node whose scratch folder has no room any more; the next attempt finds that out and goes elsewhere."""
    lab.wait_for_steps(2, attempts)
    node = lab.beat(0)
    assert node
    lab.cluster.run(["mount", "-o", "remount,size=64m", "/tmp"], node=node.host)
    return [*kill_rank(lab, attempts), {"preflight failure"}]


SURVIVED: list[Fault] = [
    kill_rank, kill_worker, stop_rank, rank_sleeps, kill_node, cut_link, signals_before_the_limit, end_of_time, preempt,
    restart_controller, kill_waiting_driver, unfit_node,
]  # fmt: skip


def job_ids(lab: FaultLab) -> set[str]:
    """The run's jobs; Slurm forgets old ones meanwhile."""
    return {job.id for job in lab.checkout.training_jobs()}


def come_back(lab: FaultLab, attempts: int) -> Ends:
    """The node that was killed is repaired."""
    for node in ("c1", "c2", "c3"):
        if lab.cluster.node_states()[node].startswith("down"):
            lab.cluster.start_node(node)
    return []


@pytest.mark.faults
def test_a_killed_driver_a_killed_rank_an_unfit_node_and_a_hang(lab: FaultLab, in_peace: Peace) -> None:
    """One training through all of them."""
    lab.repair()
    calm = in_peace("zero3")
    before = job_ids(lab)
    lab.order("die-before-record")
    lab.start()
    lab.wait()
    assert len(job_ids(lab) - before) == 1
    survive(lab, [unfit_node, stop_rank], calm)
    assert "which an earlier driver submitted" in lab.log()
    killed, unfit, hung, finished = lab.history()
    assert (unfit["host"], unfit["excluded"]) == ("c1", "c1") and "scratch" in unfit["message"]
    assert "rank 1 on c3 does not answer (its process is stopped)" in hung["message"]
    assert killed["attempt"] == 1 and finished["attempt"] == 4


@pytest.mark.faults
def test_signals_a_dead_controller_and_a_dead_node_that_comes_back(lab: FaultLab, in_peace: Peace) -> None:
    """A node that comes back sometimes takes the step that was just started with it."""
    lab.repair()
    calm = in_peace("zero3")
    survive(lab, [signals_before_the_limit, restart_controller, kill_node, come_back], calm, spare={"unknown"})
    told, *_, finished = lab.history()
    assert told["checkpoint_step"] > 0, "saved when it was told to"
    assert finished["end"] == "finished"


@pytest.mark.faults
@pytest.mark.parametrize("fault", SURVIVED, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_fault_is_survived(lab: FaultLab, in_peace: Peace, strategy: str, fault: Fault) -> None:
    lab.repair()
    survive(lab, [fault], in_peace(strategy))


# ---- what stops the driver, with the one error that matters; the same command goes on -------------------------------


def cancel(lab: FaultLab) -> str:
    lab.wait_for_steps(2)
    (job,) = [job.id for job in lab.checkout.training_jobs() if job.state == "RUNNING"]
    lab.cluster.run(["scancel", job])
    return "cancelled by a person"


def raise_in_rank(lab: FaultLab) -> str:
    lab.wait_for_steps(2)
    lab.order("raise")
    return "error in the training"


def touch_stop_file(lab: FaultLab) -> str:
    lab.wait_for_steps(2)
    (lab.checkout.run / "train/STOP").touch()
    return "stop requested"


@pytest.mark.faults
@pytest.mark.parametrize("stop", [cancel, raise_in_rank, touch_stop_file])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_must_stop_stops_and_goes_on_when_told(
    lab: FaultLab, in_peace: Peace, strategy: str, stop: Callable[[FaultLab], str]
) -> None:
    lab.repair()
    calm = in_peace(strategy)
    before = job_ids(lab)
    lab.start()
    end = stop(lab)
    assert lab.wait() == 2, lab.log()
    assert lab.ends() == [end]
    assert len(job_ids(lab) - before) == 1, "nothing was submitted again"
    assert (stop is raise_in_rank) == ("the test ordered this error" in lab.log())
    lab.start()
    assert lab.wait() == 0
    assert lab.ends() == [end, "finished"]
    assert_as_in_peace(lab, calm)


@pytest.mark.faults
@pytest.mark.parametrize("moment", ["die-before-submit", "die-before-record"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_driver_killed_at_its_submission(lab: FaultLab, in_peace: Peace, strategy: str, moment: str) -> None:
    lab.repair()
    calm = in_peace(strategy)
    before = job_ids(lab)
    lab.order(moment)
    lab.start()
    assert lab.wait() == -9
    lab.start()
    assert lab.wait() == 0, lab.log()
    assert len(job_ids(lab) - before) == 1, "one submission in all"
    assert lab.ends() == ["finished"]
    assert_as_in_peace(lab, calm)


TENSORS_APART = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 18),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_ARENA_MAX": "1",
    "PYTHONMALLOC": "malloc",
}
"""Every large tensor is a mapping of its own, and whatever else wants memory finds it in a heap with room to spare."""


@pytest.mark.faults
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_out_of_memory_goes_down_two_rungs(lab: FaultLab, in_peace: Peace, strategy: str) -> None:
    """To a smaller micro batch, then to recomputation, which is a fallback only where sequences are long enough.

    torch's allocator gets no more from the kernel.
    """
    lab.repair()
    calm = in_peace(strategy, sequence_length=128)
    few = {"every_steps": lab.steps // 2}  # what runs out of memory shall be a step and not a save
    lab.configure(strategy, sequence_length=128, micro_batch_size="auto", checkpoints=few)
    lab.start(**TENSORS_APART)
    for attempt in (1, 2):
        lab.wait_for_steps(2, attempt)
        lab.order("memory-limit")
        lab.wait_for_ends(attempt, "the attempt")
    assert lab.wait() == 0, lab.log()
    assert lab.ends() == ["host out of memory", "host out of memory", "finished"], lab.log()
    sentences = [record["message"] for record in lab.history()[:2]]
    assert all("can't allocate memory: you tried to allocate" in sentence for sentence in sentences), sentences
    choices = [Plan.read(attempt.plan).choice for attempt in lab.attempts()]
    assert [choice.gradient_checkpointing for choice in choices] == [False, False, True]
    assert choices[0].micro_batch_size > choices[1].micro_batch_size
    assert_as_in_peace(lab, calm, tolerance=1e-3)


@pytest.mark.faults
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_that_is_killed_for_its_memory_gets_more(lab: FaultLab, in_peace: Peace, strategy: str) -> None:
    """By the kernel, in a cgroup as Slurm makes them where it is told to; the Slurm of the tests is not."""
    if not may_limit():
        pytest.skip("no memory cgroup can be made here")
    lab.repair()
    calm = in_peace(strategy)

    def starve(lab: FaultLab, attempts: int) -> Ends:
        beat = lab.wait_for_steps(2, attempts)
        for pid in (lab.parent(beat, 2), lab.parent(beat, 1), beat.pid):
            lab.cluster.run(["sh", "-c", f"echo {pid} > {group.processes}"], node=beat.host)
        lab.order("eat")
        return [{"host out of memory"}]

    with cgroup() as group:
        survive(lab, [starve], calm)
    assert "-> request all of a node's memory" in lab.log()
    starved, finished = (Plan.read(attempt.plan).resources["train"].memory_gib for attempt in lab.attempts())
    assert starved < finished


@pytest.mark.faults
def test_slurmdbd_down(inputs: Path) -> None:
    """The job is submitted, watched and seen to its end without accounting's answers."""
    with Cluster(STATE.with_name(f"{STATE.name}-second"), accounting=True) as cluster:
        lab = make_lab(cluster, cluster.shared / "faults", inputs)
        lab.configure("zero2")
        lab.start()
        beat = lab.wait_for_steps(2)
        cluster.run(["kill", (cluster.state / "slurmdbd.pid").read_text().strip()])
        lab.send("KILL", beat.pid, beat.host)
        assert lab.wait() == 0, lab.log()
        assert lab.ends()[-1] == "finished" and len(lab.ends()) == 2
        assert max(lab.result()) == lab.steps
