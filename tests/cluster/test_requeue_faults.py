"""Jobs that Slurm itself starts again (``slurm.extra: {requeue: true}``): each run ends as an undisturbed one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmake.run.evaluation import EvaluationResult
from shardmake.run.paths import RunDir
from tests.cluster import baseline
from tests.cluster.baseline import BaselineRuns, assert_equals_baseline
from tests.cluster.fault_run import FaultRun

pytestmark = [pytest.mark.cluster, pytest.mark.training, pytest.mark.faults, pytest.mark.timeout(1800)]
STRATEGIES = ("ddp", *baseline.STRATEGIES)
REQUEUE: dict[str, object] = {"slurm": {"extra": {"requeue": True}}}
SETTINGS: dict[str, object] = REQUEUE | {"max_steps": 60}


def requeue(run: FaultRun) -> None:
    """Let an administrator restart the training's job, and wait until its first node has begun again."""
    attempt = run.attempt()
    assert attempt
    starts = len(list(attempt.root.glob("start-*")))
    (job,) = [job.id for job in run.checkout.training_jobs() if job.state == "RUNNING"]
    run.cluster.run(["scontrol", "requeue", job])
    archive = attempt.root / f"start-{starts}"
    run.cluster.wait_until(archive.exists, f"start {starts + 1} of job {job}; {run.log()}", timeout=120)


def before_the_first_checkpoint(run: FaultRun) -> int:
    run.order("slow")
    run.wait_for_steps(2)
    assert not list(RunDir(run.checkout.run).checkpoints.glob("checkpoint-*")), "a later step than this test is about"
    requeue(run)
    return 1


def between_checkpoints(run: FaultRun) -> int:
    run.wait_for_steps(run.every + 4)
    requeue(run)
    return 1


def in_the_middle_of_a_save(run: FaultRun) -> int:
    """Rank 1 waits before it writes its state of the random numbers; the other rank has written its part."""
    run.wait_for_steps(run.every + 2)
    log = run.checkout.root / "writes.log"
    log.unlink(missing_ok=True)
    checkpoints = RunDir(run.checkout.run).checkpoints
    pattern = r"^torch\.save .*/rng_state_1"
    order = {"folder": str(checkpoints), "log": str(log), "at": pattern, "mode": "hold"}
    run.order("killer-1", json.dumps(order))
    run.cluster.wait_until(lambda: log.exists() and "rng_state_1" in log.read_text(), "the save", timeout=240)
    requeue(run)
    return 1


def twice_in_a_row(run: FaultRun) -> int:
    """The second time before the restarted ranks have done a step."""
    run.wait_for_steps(run.every + 4)
    requeue(run)
    requeue(run)
    return 2


MOMENTS: list[Callable[[FaultRun], int]] = [
    before_the_first_checkpoint, between_checkpoints, in_the_middle_of_a_save, twice_in_a_row,
]  # fmt: skip
"""Each restarts the job at a moment, and returns how often."""


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_that_slurm_restarts(
    run: FaultRun, baseline_run: BaselineRuns, strategy: str, moment: Callable[[FaultRun], int]
) -> None:
    """The same attempt continues in the same job, without the driver."""
    assert_continues_in_one_job(run, baseline_run, strategy, moment, SETTINGS)


def assert_continues_in_one_job(
    run: FaultRun,
    baseline_run: BaselineRuns,
    strategy: str,
    moment: Callable[[FaultRun], int],
    settings: dict[str, object],
) -> None:
    """Train with ``settings`` and a restart at ``moment``, and compare with an undisturbed training."""
    run.repair()
    undisturbed = baseline_run(strategy, **settings)
    run.start()
    restarts = moment(run)
    assert run.wait() == 0, run.log()
    assert run.ends() == ["finished"], run.log()
    (attempt,) = run.attempts()
    assert attempt.read().start == restarts
    assert_equals_baseline(run, undisturbed)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_that_slurm_preempts_and_queues_again(
    run: FaultRun, baseline_run: BaselineRuns, strategy: str
) -> None:
    """If the ranks have saved and ended within the grace time, the driver submits the next job instead of Slurm."""
    run.repair()
    undisturbed = baseline_run(strategy, **SETTINGS)
    run.start()
    run.wait_for_steps(run.every + 2)
    out = run.checkout.root / "urgent.out"
    options = f"--parsable --partition=urgent --nodes=3 --exclusive --output={out}"
    urgent = run.cluster.run(f"sbatch {options} --wrap 'sleep 5'").stdout.strip()
    run.cluster.wait_job(urgent, "COMPLETED", timeout=120)
    assert run.wait() == 0, run.log()
    *preempted, end = run.ends()
    assert preempted in ([], ["preempted"]) and end == "finished", run.log()
    assert preempted or run.attempts()[0].read().start == 1, "Slurm restarted it"
    assert_equals_baseline(run, undisturbed)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_jobs_of_merge_and_evaluation_that_slurm_restarts(
    run: FaultRun, baseline_run: BaselineRuns, strategy: str
) -> None:
    """Each is restarted while it writes its result."""
    run.repair()
    undisturbed = baseline_run(strategy, **SETTINGS)
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
        run.cluster.wait_until(lambda order=order: not order.exists(), f"{stage}; {log.read_text()}", timeout=200)
        run.cluster.run(["scontrol", "requeue", job_of_stage(run, stage)])
    assert workflow.wait(300) == 0, log.read_text()
    print(log.read_text())
    restarted = losses_of(evaluation)
    assert_equals_baseline(run, undisturbed)
    assert (model / "model.safetensors").read_bytes() == (run.checkout.root / "merged/model.safetensors").read_bytes()
    evaluation.unlink()
    run.checkout.on_login_node("shardmake", "evaluate", "demo", env=run.environment)
    assert losses_of(evaluation) == pytest.approx(restarted, rel=1e-6)
    evaluation.unlink()


def losses_of(evaluation: Path) -> list[float]:
    """Return the losses of the base and the tuned model."""
    scores = EvaluationResult.read(evaluation).scores
    assert scores
    return [score.loss for score in scores]


def job_of_stage(run: FaultRun, stage: str) -> str:
    """Return the id of the running job of a stage, which Snakemake names in the job's comment."""
    listed = run.cluster.run(["squeue", "--noheader", "--states=RUNNING", "--format=%i %k"]).stdout
    (job,) = [line.split()[0] for line in listed.splitlines() if f"rule_{stage}_run" in line]
    return job
