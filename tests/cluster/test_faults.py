"""Trainings with faults on the three-node Slurm; each must end with the result of an undisturbed one."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.consolidate_limits import cgroup, may_limit
from shardmake.core.errors import STOPPED
from shardmake.run.plan import Plan
from tests.cluster.baseline import STRATEGIES, BaselineRuns, Ends, Fault, assert_equals_baseline, recover_from
from tests.cluster.fault_run import FaultRun, make_fault_run
from tests.cluster.harness import STATE, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.training, pytest.mark.timeout(1800)]
CHANCE = random.Random(7)


# ---- faults: each returns the possible ends of its attempts ------------------------------------------------------


def kill_rank(run: FaultRun, attempts: int) -> Ends:
    beat = run.wait_for_steps(CHANCE.randint(2, 15), attempts)
    run.send("KILL", beat.pid, beat.host)
    return [{"a process was killed", "communication failure"}]


def kill_worker(run: FaultRun, attempts: int) -> Ends:
    beat = run.wait_for_steps(CHANCE.randint(2, 15), attempts)
    run.send("KILL", run.parent(beat, 2), beat.host)
    return [{"a process was killed", "communication failure", "unknown"}]


def stop_rank(run: FaultRun, attempts: int) -> Ends:
    beat = run.wait_for_steps(CHANCE.randint(2, 15), attempts)
    run.send("STOP", beat.pid, beat.host)
    return [{"hang"}]


def rank_sleeps(run: FaultRun, attempts: int) -> Ends:
    run.wait_for_steps(2, attempts)
    run.order("sleep")
    return [{"hang"}]


def kill_node(run: FaultRun, attempts: int) -> Ends:
    beat = run.wait_for_steps(CHANCE.randint(2, 15), attempts)
    run.cluster.kill_node(beat.host)
    run.cluster.declare_down(beat.host)
    return [{"node failure"}]


def cut_link(run: FaultRun, attempts: int) -> Ends:
    beat = run.wait_for_steps(CHANCE.randint(2, 15), attempts)
    run.cluster.cut(beat.host)
    return [{"node failure", "hang", "communication failure"}]


def signals_before_the_limit(run: FaultRun, attempts: int) -> Ends:
    """USR2 as Slurm sends it, twice, and on one node SIGTERM as well, a moment later."""
    beat = run.wait_for_steps(CHANCE.randint(2, 15), attempts)
    (job,) = [job.id for job in run.checkout.training_jobs() if job.state == "RUNNING"]
    worker = run.parent(beat, 2)
    for _ in range(2):
        run.cluster.run(["scancel", "--signal=USR2", job])
    run.cluster.run(["sh", "-c", f"sleep 0.3; kill -TERM {worker} || true"], node=beat.host)
    return [{"time limit"}]


def end_of_time(run: FaultRun, attempts: int) -> Ends:
    """The limit itself, moved to now. Slurm looks at limits twice a minute, and the training must not end before."""
    run.order("slow")
    run.wait_for_steps(CHANCE.randint(2, 15), attempts)
    (job,) = [job.id for job in run.checkout.training_jobs() if job.state == "RUNNING"]
    run.cluster.run(["scontrol", "update", f"jobid={job}", "endtime=now"])
    return [{"time limit"}]


def preempt(run: FaultRun, attempts: int) -> Ends:
    run.wait_for_steps(2, attempts)
    out = run.checkout.root / "urgent.out"
    urgent = run.cluster.run(
        f"sbatch --parsable --partition=urgent --nodes=3 --exclusive --output={out} --wrap 'sleep 600'"
    ).stdout.strip()
    run.cluster.wait_job(urgent, "RUNNING", timeout=90)
    run.cluster.run(["scancel", urgent])
    return [{"preempted", "stopped by SIGTERM"}]


def allow_restart(run: FaultRun) -> str:
    """Let Slurm restart the run's job, as ``slurm.extra: {requeue: true}`` does; return its id."""
    (job,) = [job.id for job in run.checkout.training_jobs() if job.state == "RUNNING"]
    run.cluster.run(["scontrol", "update", f"jobid={job}", "requeue=1"])
    return job


def restart_job(run: FaultRun, attempts: int) -> Ends:
    """An administrator restarts the job after it has committed a checkpoint; the attempt continues.

    Slurm restarts only jobs that it may restart, and would then also restart the job after a later fault.
    """
    run.wait_for_steps(run.every + CHANCE.randint(2, 8), attempts)
    job = allow_restart(run)
    run.cluster.run(["scontrol", "requeue", job])
    run.cluster.run(["scontrol", "update", f"jobid={job}", "requeue=0"])
    return []


def kill_node_and_restart(run: FaultRun, attempts: int) -> Ends:
    run.wait_for_steps(run.every + 2, attempts)
    allow_restart(run)
    kill_node(run, attempts)
    return []


def restart_controller(run: FaultRun, attempts: int) -> Ends:
    run.wait_for_steps(2, attempts)
    run.cluster.stop_controller()
    run.wait_for_steps(15, attempts)
    run.cluster.run(["slurmctld"])
    return []


def kill_and_restart_driver(run: FaultRun, attempts: int) -> Ends:
    run.wait_for_steps(2, attempts)
    kill_driver(run)
    run.start()
    run.cluster.wait_until(lambda: "Adopting job" in run.log(), "adoption")
    return []


def kill_driver(run: FaultRun) -> None:
    assert run.driver
    run.driver.kill()
    run.driver.wait()


def fill_scratch(run: FaultRun, attempts: int) -> Ends:
    """Fill the scratch folder of a node; the next attempt detects that and excludes the node."""
    run.wait_for_steps(2, attempts)
    node = run.beat(0)
    assert node
    run.cluster.run(["mount", "-o", "remount,size=64m", "/tmp"], node=node.host)
    return [*kill_rank(run, attempts), {"preflight failure"}]


FAULTS: list[Fault] = [
    kill_rank, kill_worker, stop_rank, rank_sleeps, kill_node, cut_link, signals_before_the_limit, end_of_time, preempt,
    restart_controller, kill_and_restart_driver, fill_scratch, restart_job, kill_node_and_restart,
]  # fmt: skip


def job_ids(run: FaultRun) -> set[str]:
    """Return the run's jobs that Slurm still lists."""
    return {job.id for job in run.checkout.training_jobs()}


def restart_nodes(run: FaultRun, attempts: int) -> Ends:
    """Start every node that is down."""
    for node in ("c1", "c2", "c3"):
        if run.cluster.node_states()[node].startswith("down"):
            run.cluster.start_node(node)
    return []


@pytest.mark.faults
def test_a_killed_driver_a_killed_rank_a_full_scratch_and_a_hang(run: FaultRun, baseline_run: BaselineRuns) -> None:
    """One training through all of them."""
    run.repair()
    baseline = baseline_run("zero3")
    before = job_ids(run)
    run.order("kill-before-record")
    run.start()
    run.wait()
    assert len(job_ids(run) - before) == 1
    recover_from(run, [fill_scratch, stop_rank], baseline)
    assert "which an earlier driver submitted" in run.log()
    killed, failing, hung, finished = run.history()
    assert (failing["host"], failing["excluded"]) == ("c1", "c1") and "scratch" in failing["message"]
    assert "rank 1 on c3 does not answer (its process is stopped)" in hung["message"]
    assert killed["attempt"] == 1 and finished["attempt"] == 4


@pytest.mark.faults
def test_signals_a_stopped_controller_and_a_node_that_fails_and_returns(
    run: FaultRun, baseline_run: BaselineRuns
) -> None:
    """A node that returns sometimes ends the step that has just started."""
    run.repair()
    baseline = baseline_run("zero3")
    recover_from(
        run, [signals_before_the_limit, restart_controller, kill_node, restart_nodes], baseline, spare={"unknown"}
    )
    first, *_, finished = run.history()
    assert first["checkpoint_step"] > 0, "saved on the signal"
    assert finished["end"] == "finished"


@pytest.mark.faults
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_recovers_from_each_fault(
    run: FaultRun, baseline_run: BaselineRuns, strategy: str, fault: Fault
) -> None:
    run.repair()
    recover_from(run, [fault], baseline_run(strategy))


@pytest.mark.faults
def test_a_node_failure_after_a_restart_ends_the_attempt(run: FaultRun, baseline_run: BaselineRuns) -> None:
    """An administrator's restart does not let Slurm restart the job by itself, whose end the campaign waits for."""
    run.repair()
    recover_from(run, [restart_job, kill_node], baseline_run("zero2"))
    assert run.ends() == ["node failure", "finished"]


# ---- ends that stop the driver; the same command resumes ------------------------------------------------------------


def cancel(run: FaultRun) -> str:
    run.wait_for_steps(2)
    (job,) = [job.id for job in run.checkout.training_jobs() if job.state == "RUNNING"]
    run.cluster.run(["scancel", job])
    return "cancelled by a person"


def raise_in_rank(run: FaultRun) -> str:
    run.wait_for_steps(2)
    run.order("raise")
    return "error in the training"


def touch_stop_file(run: FaultRun) -> str:
    run.wait_for_steps(2)
    (run.checkout.run / "train/STOP").touch()
    return "stop requested"


@pytest.mark.faults
@pytest.mark.parametrize("stop", [cancel, raise_in_rank, touch_stop_file])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stopped_training_resumes_with_the_same_command(
    run: FaultRun, baseline_run: BaselineRuns, strategy: str, stop: Callable[[FaultRun], str]
) -> None:
    run.repair()
    baseline = baseline_run(strategy)
    before = job_ids(run)
    run.start()
    end = stop(run)
    assert run.wait() == (2 if stop is raise_in_rank else STOPPED), run.log()
    assert run.ends() == [end]
    assert len(job_ids(run) - before) == 1, "no job was submitted again"
    assert (stop is raise_in_rank) == ("the test ordered this error" in run.log())
    run.start()
    assert run.wait() == 0
    assert run.ends() == [end, "finished"]
    assert_equals_baseline(run, baseline)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("moment", "ends"), [("kill-before-submit", -9), ("kill-before-record", -9), ("kill-sbatch", 0)]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_driver_or_sbatch_killed_at_a_submission(
    run: FaultRun, baseline_run: BaselineRuns, strategy: str, moment: str, ends: int
) -> None:
    """A driver adopts the job that Slurm accepted, also where the client of sbatch was killed after that."""
    run.repair()
    baseline = baseline_run(strategy)
    before = job_ids(run)
    run.order(moment)
    run.start()
    assert run.wait() == ends, run.log()
    if ends:
        run.start()
        assert run.wait() == 0, run.log()
    assert len(job_ids(run) - before) == 1, "one submission in all"
    assert run.ends() == ["finished"]
    assert_equals_baseline(run, baseline)


ALL_OTHERS = [pytest.param(strategy, marks=pytest.mark.faults) for strategy in STRATEGIES[1:]]


@pytest.mark.parametrize("strategy", [STRATEGIES[0], *ALL_OTHERS])
def test_a_driver_ends_with_its_snakemake_and_the_next_command_takes_over(
    run: FaultRun, baseline_run: BaselineRuns, strategy: str
) -> None:
    """kill -9 leaves the driver without anybody who reads its end."""
    run.repair()
    baseline = baseline_run(strategy)
    before = job_ids(run)
    snakemake = run.start_snakemake()
    run.wait_for_steps(2)
    snakemake.kill()
    snakemake.wait()
    run.start()
    assert run.wait() == 0, run.log()
    assert "The Snakemake of this driver was killed: the driver exits" in run.log()
    assert len(job_ids(run) - before) == 1 and run.ends() == ["finished"], run.log()
    assert_equals_baseline(run, baseline)


SEPARATE_TENSORS = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 18),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_ARENA_MAX": "1",
    "PYTHONMALLOC": "malloc",
}
"""Each large tensor gets its own mapping; all other memory comes from a large enough heap."""


@pytest.mark.faults
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_out_of_memory_takes_two_fallbacks(run: FaultRun, baseline_run: BaselineRuns, strategy: str) -> None:
    """First a smaller micro batch, then recomputation, which is a fallback only for long enough sequences.

    The kernel gives torch's allocator no more memory.
    """
    run.repair()
    baseline = baseline_run(strategy, sequence_length=128)
    few = {"every_steps": run.steps // 2}  # a step must run out of memory, not a save
    run.configure(strategy, sequence_length=128, micro_batch_size="auto", checkpoints=few)
    run.start(**SEPARATE_TENSORS)
    for attempt in (1, 2):
        run.wait_for_steps(2, attempt)
        run.order("memory-limit")
        run.wait_for_ends(attempt, "the attempt")
    assert run.wait() == 0, run.log()
    assert run.ends() == ["host out of memory", "host out of memory", "finished"], run.log()
    sentences = [record["message"] for record in run.history()[:2]]
    assert all("can't allocate memory: you tried to allocate" in sentence for sentence in sentences), sentences
    choices = [Plan.read(attempt.plan).choice for attempt in run.attempts()]
    assert [choice.gradient_checkpointing for choice in choices] == [False, False, True]
    assert choices[0].micro_batch_size > choices[1].micro_batch_size
    assert_equals_baseline(run, baseline, tolerance=1e-3)


@pytest.mark.faults
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_killed_at_its_memory_limit_gets_more(run: FaultRun, baseline_run: BaselineRuns, strategy: str) -> None:
    """The kernel kills it in a cgroup that the test makes, because the Slurm of the tests makes none."""
    if not may_limit():
        pytest.skip("this machine allows no memory cgroup")
    run.repair()
    baseline = baseline_run(strategy)

    def starve(run: FaultRun, attempts: int) -> Ends:
        beat = run.wait_for_steps(2, attempts)
        for pid in (run.parent(beat, 2), run.parent(beat, 1), beat.pid):
            run.cluster.run(["sh", "-c", f"echo {pid} > {group.processes}"], node=beat.host)
        run.order("eat")
        return [{"host out of memory"}]

    with cgroup() as group:
        recover_from(run, [starve], baseline)
    assert "-> request all of a node's memory" in run.log()
    starved, finished = (Plan.read(attempt.plan).resources["train"].memory_gib for attempt in run.attempts())
    assert starved < finished


@pytest.mark.faults
def test_slurmdbd_down(inputs: Path) -> None:
    """The driver submits and watches the job without accounting."""
    with Cluster(STATE.with_name(f"{STATE.name}-second"), accounting=True) as cluster:
        run = make_fault_run(cluster, cluster.shared / "faults", inputs)
        baseline = BaselineRuns(run)("zero2")
        run.start()
        beat = run.wait_for_steps(2)
        cluster.run(["kill", (cluster.state / "slurmdbd.pid").read_text().strip()])
        run.send("KILL", beat.pid, beat.host)
        assert run.wait() == 0, run.log()
        assert run.ends()[-1] == "finished" and len(run.ends()) == 2
        assert_equals_baseline(run, baseline)
