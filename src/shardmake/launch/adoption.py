"""Find and adopt the job of an earlier driver, so that a run never has two jobs."""

import logging
import time

from shardmake.core.errors import ShardmakeError, SlurmError
from shardmake.launch.slurm_states import JobState
from shardmake.launch.training import Training
from shardmake.run.attempt import SubmittedJob

logger = logging.getLogger(__name__)


def adopt(training: Training) -> SubmittedJob | None:
    """Return the job of an earlier driver if it trains with the current settings.

    A job of other settings must not be judged by the current ones: its model would count as this run's.

    Raises:
        ShardmakeError: a job of other settings is still queued or running.
    """
    job = _find_job(training)
    if job is None or _has_current_settings(training, job):
        return job
    if training.jobs.status(job.id).state not in (JobState.ENDED, JobState.GONE):
        raise ShardmakeError(
            f"Job {job.id} (attempt {job.attempt}) still trains {training.rundir.name} with other settings. Restore "
            "those settings to adopt the job, wait for its end, or cancel it "
            f"({training.jobs.cancel_command(job.id)}). Then run the same command again."
        )
    logger.info("Job %s (attempt %d) of other settings has ended.", job.id, job.attempt)
    training.rundir.job.unlink(missing_ok=True)
    return None


def _has_current_settings(training: Training, job: SubmittedJob) -> bool:
    folder = training.attempt_dir(job.attempt)
    return folder.settings.exists() and folder.read().settings_digest == training.settings_digest


def _find_job(training: Training) -> SubmittedJob | None:
    """Return the recorded job, or one that was submitted and not recorded."""
    path = training.rundir.job
    recorded = SubmittedJob.read_if_exists(path)
    try:
        active = training.jobs.find()
    except SlurmError:
        if recorded is None:
            raise
        active = None
    if recorded and (active is None or active == recorded.id):
        logger.info("Adopting job %s (attempt %d).", recorded.id, recorded.attempt)
        return recorded
    if active:
        job = SubmittedJob(id=active, attempt=training.last_attempt(), submitted=time.time())
        job.write(path)
        logger.info("Adopting job %s (attempt %d), which an earlier driver submitted.", job.id, job.attempt)
        return job
    return None
