"""The driver of a run's training: adopt or submit a job, watch it, decide what follows. It owns all retries.

Neither Snakemake nor Slurm nor torchrun repeats anything. The driver determines why an attempt ended. It then resumes,
takes the plan's next fallback, or stops with the error that matters. If the driver exits, the job keeps running and
the next driver adopts it.
"""

import logging

from shardmake.config.models import Cluster, Run
from shardmake.core.permissions import refuse_job_of_others
from shardmake.launch.adoption import adopt
from shardmake.launch.attempt_end import record_attempt
from shardmake.launch.decision import apply_decision
from shardmake.launch.driver_lock import hold_driver_lock
from shardmake.launch.driver_signals import raise_on_signals
from shardmake.launch.messages import short_path
from shardmake.launch.monitor import watch
from shardmake.launch.slurm_jobs import job_owners
from shardmake.launch.stop_file import clear_stop_file
from shardmake.launch.submission import submit
from shardmake.launch.training import Training
from shardmake.run.attempt_history import EndReason
from shardmake.run.paths import RunDir

logger = logging.getLogger(__name__)


def train(run: Run, cluster: Cluster, rundir: RunDir) -> None:
    """Train ``run`` to its final step.

    Raises:
        ShardmakeError: the training cannot continue; the message says why.
    """
    rundir.train.mkdir(parents=True, exist_ok=True)
    with hold_driver_lock(rundir) as lock, raise_on_signals():
        if cluster.shared and cluster.executor == "slurm":
            refuse_job_of_others(job_owners(rundir.root), rundir.name, short_path(rundir.stop_file))
        drive(Training.load(run, cluster, rundir, lock))


def drive(training: Training) -> None:
    """Submit and watch one attempt after another, until the training has finished."""
    job = adopt(training)
    if job is None and not training.has_waited:
        clear_stop_file(training.rundir)
    while not (job is None and training.is_finished()):
        job = job or submit(training)
        status = watch(training, job)
        outcome = record_attempt(training, job, status)
        job = None
        if outcome.end is EndReason.FINISHED:
            logger.info(outcome.message)
        else:
            apply_decision(training, outcome)
