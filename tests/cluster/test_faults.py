"""Trainings with faults on the three-node Slurm; each must end with the result of an undisturbed one."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.consolidate_limits import may_limit
from shardmake.checkpoint import store
from shardmake.core.errors import STOPPED
from shardmake.run.evaluation import EvaluationResult
from shardmake.run.plan import Plan
from tests.cluster import faults as f
from tests.cluster.baseline import BaselineRuns, Fault, assert_equals_baseline, recover_from
from tests.cluster.fault_run import FaultRun, make_fault_run
from tests.cluster.harness import STATE, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.training, pytest.mark.faults, pytest.mark.timeout(3600)]
SEPARATE_TENSORS = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_TOP_PAD_": str(64 << 20), "MALLOC_ARENA_MAX": "1",
    "PYTHONMALLOC": "malloc",
}  # fmt: skip
"""Each large tensor gets its own mapping; all other memory comes from a large enough heap."""


class Training(NamedTuple):
    """Faults of one training, in their order, and settings that do not change its result."""

    strategy: str
    faults: list[Fault]
    settings: dict[str, Any] = {}  # noqa: RUF012
    reads_in_job: bool = False
    spare: frozenset[str] = frozenset()
    """Ends that may occur in between: a node that returns sometimes ends the step that has just started."""


REQUEUE = {"slurm": {"extra": {"requeue": True}}}
IMPATIENT = {"slurm": {"srun_extra": ["--msg-timeout=2"]}}
ONE_NODE = {"nodes": 1, "ranks_per_node": 2}
ASYNCHRONOUS = {"checkpoints": {"every_steps": FaultRun.every, "asynchronous": True}}
NODES_RETURN = frozenset({"unknown"})
TRAININGS = {
    "ddp-restarted": Training("ddp", [
        f.restart_before_the_first_checkpoint, f.kill_rank, f.cut_a_shard, f.kill_rank_before_the_record_of_a_save,
        f.preempt, f.cancel, f.raise_in_rank,
    ], REQUEUE),
    "ddp-nodes": Training(
        "ddp", [f.kill_driver_before_submission_and_stop_slurmd, f.restart_controller, f.fill_scratch], IMPATIENT,
    ),
    "zero2-ranks": Training("zero2", [
        f.restart_between_checkpoints, f.kill_rank_before_a_save, f.flip_a_shard, f.flip_the_record, f.preempt,
        f.signals_before_the_limit, f.stop_rank, f.kill_worker,
    ]),
    "zero2-submissions": Training("zero2", [
        f.kill_driver, f.kill_driver_after_submission, f.kill_sbatch_after_submission, f.accept_job_after_sbatch_failed,
        f.accept_job_after_sbatch_was_repeated,
    ], ONE_NODE),
    "zero3-ranks": Training("zero3", [
        f.restart_in_a_save, f.kill_rank_between_files_of_a_save, f.flip_a_shard, f.swap_a_shard_for_a_link,
        f.end_of_time, f.rank_sleeps, f.freeze_and_thaw_node,
    ], reads_in_job=True, spare=NODES_RETURN),
    "zero3-asynchronous": Training("zero3", [f.kill_node, f.cut_link], ASYNCHRONOUS, spare=NODES_RETURN),
    "fsdp-ranks": Training("fsdp", [
        f.restart_twice_in_a_row, f.kill_rank_after_a_save, f.flip_a_shard, f.put_a_foreign_checkpoint_beside,
        f.touch_stop_file, f.kill_snakemake,
    ]),
    "fsdp-asynchronous": Training("fsdp", [f.kill_node, f.kill_node_and_restart], ASYNCHRONOUS, spare=NODES_RETURN),
    "fsdp-memory": Training("fsdp", [f.exceed_memory]),
}  # fmt: skip
"""Each kind of fault under each strategy in which it has another mechanism; of the others, one strategy stands for all.

`make test-sweep` kills a rank at every write of a save.
"""


@pytest.mark.parametrize("training", TRAININGS)
def test_training_recovers_from(run: FaultRun, baseline_run: BaselineRuns, training: str) -> None:
    strategy, faults, settings, reads_in_job, spare = TRAININGS[training]
    if f.exceed_memory in faults and not may_limit():
        pytest.skip("this machine allows no memory cgroup")
    run.repair()
    baseline = baseline_run(strategy)
    run.configure(strategy, **settings)
    run.reads_in_job = reads_in_job
    recover_from(run, faults, baseline, spare)
    records = [record for record, _ in store.committed(run.checkpoints)]
    is_asynchronous = any(record.blocked_seconds is not None for record in records)  # only the last save waits
    assert is_asynchronous == (settings == ASYNCHRONOUS)
    foreign, private = run.checkpoints.glob("foreign-checkpoint-1000-*"), run.checkout.run / "private"
    assert len(list(foreign)) == (f.put_a_foreign_checkpoint_beside in faults)
    assert private.exists() == (f.swap_a_shard_for_a_link in faults)
    private.unlink(missing_ok=True)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_out_of_memory_takes_two_fallbacks(run: FaultRun, baseline_run: BaselineRuns, strategy: str) -> None:
    """First a smaller micro batch, then recomputation, which is a fallback only for long enough sequences.

    The kernel gives torch's allocator no more memory.
    """
    run.repair()
    settings = {"sequence_length": 512, "global_batch_size": 4, "max_steps": 40}
    baseline = baseline_run(strategy, **settings)
    few = {"every_steps": 20}  # a step must run out of memory, not a save
    run.configure(strategy, micro_batch_size="auto", checkpoints=few, **settings)
    run.start(**SEPARATE_TENSORS)
    run.slow(0.5)  # the limit must not come as late as the save
    for attempt in (1, 2):
        run.wait_for_steps(2, attempt)
        run.order("memory-limit")
        run.wait_for_ends(attempt, "the attempt")
    run.slow(0)
    assert run.wait() == 0, run.log()
    assert run.ends() == ["host out of memory", "host out of memory", "finished"], run.log()
    sentences = [record["message"] for record in run.history()[:2]]
    assert all("can't allocate memory: you tried to allocate" in sentence for sentence in sentences), sentences
    choices = [Plan.read(attempt.plan).choice for attempt in run.attempts()]
    assert [choice.gradient_checkpointing for choice in choices] == [False, False, True]
    assert choices[0].micro_batch_size > choices[1].micro_batch_size
    assert_equals_baseline(run, baseline, tolerance=1e-3)


@pytest.mark.parametrize("strategy", ["zero3"])
def test_training_resumes_from_4_ranks_on_2_then_on_3(run: FaultRun, baseline_run: BaselineRuns, strategy: str) -> None:
    """The batches stay the same, in another order of summation. `tests.workflow.test_reshard` has every strategy."""
    run.repair()
    settings = {"global_batch_size": 12, "micro_batch_size": 1, "max_steps": 30}
    baseline = baseline_run(strategy, **settings)
    ranks = []
    for nodes, ranks_per_node in ((2, 2), (2, 1), (3, 1)):
        run.configure(strategy, ranks_per_node=ranks_per_node, nodes=nodes, **settings)
        run.start()
        if nodes < 3:
            run.wait_for_steps(2, len(ranks) + 1)
            (run.checkout.run / "train/STOP").touch()
        assert run.wait() == (STOPPED if nodes < 3 else 0), run.log()
        ranks.append(run.attempts()[-1].read().world_size)
    assert ranks == [4, 2, 3]
    assert run.ends() == ["stop requested", "stop requested", "finished"], run.log()
    steps = [record["checkpoint_step"] for record in run.history()]
    assert 0 < steps[0] < steps[1] < steps[2] == 30
    assert_equals_baseline(run, baseline, tolerance=1e-3)


@pytest.fixture(scope="module")
def run_on_a_small_disk(inputs: Path) -> Iterator[FaultRun]:
    """Create a run on a second cluster, whose nodes share a file system that a test may fill."""
    disk = STATE.with_name(f"{STATE.name}-disk")
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", disk], check=True)
    try:
        with Cluster(STATE.with_name(f"{STATE.name}-second")) as cluster:
            yield make_fault_run(cluster, disk / "faults", inputs)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
        disk.rmdir()


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_the_disk_fills_up_in_a_save(run_on_a_small_disk: FaultRun, baseline_run: BaselineRuns, strategy: str) -> None:
    """The attempt ends with its earlier checkpoints, and the driver resumes once there is space."""
    baseline, run = baseline_run(strategy), run_on_a_small_disk
    run.configure(strategy)
    run.remove_training()
    run.start()
    run.cluster.wait_until(lambda: any(store.committed(run.checkpoints)), "a checkpoint", timeout=600)
    run.order_killer(1, r"^(open|torch\.save) /\.saving", "fill")
    run.cluster.wait_until(lambda: "The driver waits up to" in run.log(), "the wait", timeout=600)
    newest = store.newest_valid(run.checkpoints)
    assert newest is not None

    (run.checkpoints.parent / "filler").unlink()
    assert run.wait() == 0, run.log()
    assert f"resuming from {newest[1].name}" in run.log()
    assert run.ends() == ["disk full", "finished"], run.log()
    assert_equals_baseline(run, baseline)


@pytest.mark.parametrize("strategy", ["ddp"])
def test_slurmdbd_is_down(baseline_run: BaselineRuns, inputs: Path, strategy: str) -> None:
    """The driver submits and watches the job without accounting."""
    baseline = baseline_run(strategy)
    with Cluster(STATE.with_name(f"{STATE.name}-second"), accounting=True) as cluster:
        run = make_fault_run(cluster, cluster.shared / "faults", inputs)
        run.configure(strategy)
        run.start()
        beat = run.wait_for_steps(2)
        cluster.run(["kill", (cluster.state / "slurmdbd.pid").read_text().strip()])
        run.send("KILL", beat.pid, beat.host)
        assert run.wait() == 0, run.log()
        assert run.ends()[-1] == "finished" and len(run.ends()) == 2
        assert_equals_baseline(run, baseline)


@pytest.mark.parametrize("strategy", ["zero2"])
def test_slurm_restarts_jobs_of_merge_and_evaluation(run: FaultRun, baseline_run: BaselineRuns, strategy: str) -> None:
    """Each is restarted while it writes its result."""
    run.repair()
    undisturbed = baseline_run(strategy)
    run.configure(strategy, **REQUEUE)
    run.start()
    assert run.wait() == 0, run.log()
    model, evaluation = run.checkout.run / "model", run.checkout.run / "evaluation.json"
    shutil.rmtree(model, ignore_errors=True)
    for stage in ("consolidate", "evaluate"):
        run.order(f"hold-{stage}")
    log = run.checkout.root / "snakemake.log"
    with log.open("w") as output:
        command = run.checkout.command("snakemake", "--profile", "slurm", "evaluate")
        workflow = run.cluster.popen(command, cwd=run.checkout.root, env=run.environment, stdout=output)
    for stage in ("consolidate", "evaluate"):
        order = run.checkout.root / "orders" / f"hold-{stage}"
        run.cluster.wait_until(lambda order=order: not order.exists(), f"{stage}; {log.read_text()}", timeout=600)
        run.cluster.run(["scontrol", "requeue", job_of_stage(run, stage)])
    assert workflow.wait(900) == 0, log.read_text()
    print(log.read_text())
    restarted = losses_of(evaluation)
    assert_equals_baseline(run, undisturbed)
    assert (model / "model.safetensors").read_bytes() == (run.checkout.root / "merged/model.safetensors").read_bytes()
    evaluation.unlink()
    run.checkout.on_login_node("shardmake", "evaluate", "demo", env=run.environment)
    assert losses_of(evaluation) == pytest.approx(restarted, rel=1e-6)
    evaluation.unlink()


def losses_of(evaluation: Path) -> list[float]:
    scores = EvaluationResult.read(evaluation).scores
    assert scores
    return [score.loss for score in scores]


def job_of_stage(run: FaultRun, stage: str) -> str:
    """Return the id of the running job of a stage, which Snakemake names in the job's comment."""
    listed = run.cluster.run(["squeue", "--noheader", "--states=RUNNING", "--format=%i %k"]).stdout
    (job,) = [line.split()[0] for line in listed.splitlines() if f"rule_{stage}_run" in line]
    return job
