"""Watch a job until it ends, and report its state and progress."""

import contextlib
import logging
import time

from shardmake.launch.driver_signals import DriverStoppedError
from shardmake.launch.low_memory_wait import wait_until_started
from shardmake.launch.messages import short_path
from shardmake.launch.progress import ProgressPrinter
from shardmake.launch.slurm_commands import waiting_snapshot
from shardmake.launch.slurm_states import JobState, JobStatus
from shardmake.launch.training import Training
from shardmake.run.attempt import AttemptDir, SubmittedJob

POLL_SECONDS = 1.0
LOW_MEMORY_WAIT_SECONDS = 5.0
logger = logging.getLogger(__name__)


def watch(training: Training, job: SubmittedJob) -> JobStatus:
    """Wait until ``job`` has ended, and return its last status."""
    progress = ProgressPrinter(training.rundir.metrics)
    pause, last = POLL_SECONDS, JobState.UNKNOWN
    try:
        while (status := training.jobs.status(job.id)).state not in (JobState.ENDED, JobState.GONE):
            pause = POLL_SECONDS if status.state is not last else min(pause * 1.5, training.jobs.slowest_poll)
            if status.state is not last:
                _report_state(status)
            last = status.state
            if status.name == "PENDING" and pause >= LOW_MEMORY_WAIT_SECONDS:
                _wait_until_started(training, job, status)
            _report_progress(training, progress, training.attempt_dir(job.attempt), pause)
    except DriverStoppedError as signal_name:
        logger.info(
            "%s: the driver exits, job %s keeps running. To watch the job, run the same command again. To save and "
            "stop: touch %s. To cancel: %s",
            signal_name,
            job.id,
            short_path(training.rundir.stop_file),
            training.jobs.cancel_command(job.id),
        )
        raise
    progress.poll()
    return status


def _report_state(status: JobStatus) -> None:
    nodes = f" on {status.nodes}" if status.state is JobState.RUNNING and status.nodes else ""
    reason = f" {status.nodes}" if status.state is not JobState.RUNNING and status.nodes else ""
    logger.info("The job is %s%s.", status.state.value, nodes or reason)


def _wait_until_started(training: Training, job: SubmittedJob, status: JobStatus) -> None:
    """Replace this process by one of little memory: a pending job may wait for days (see `low_memory_wait`)."""
    logger.info("The job is pending %s. The driver waits in low memory until it starts.", status.nodes)
    wait_until_started(job.id, training.lock, str(waiting_snapshot()))


def _report_progress(training: Training, progress: ProgressPrinter, folder: AttemptDir, seconds: float) -> None:
    """Report progress from the run's folder, which costs Slurm nothing, for ``seconds`` or until the attempt ends."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError):  # a shared file system may fail for a moment
            progress.poll()
            if training.rundir.train_receipt.exists() or folder.exits():
                time.sleep(POLL_SECONDS)
                return
        time.sleep(POLL_SECONDS / 2)
