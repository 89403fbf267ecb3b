"""Watch a job until it ends, and report its state and progress."""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

from shardmake.core.process import wait_until
from shardmake.launch.restart import end_job_without_script, record_lost_nodes, waits_for_driver
from shardmake.launch.slurm_jobs import waiting_snapshot
from shardmake.launch.slurm_states import JobState, JobStatus, held_message
from shardmake.launch.training import Training
from shardmake.launch.watcher import (
    HELD_VARIABLE,
    KILLED,
    PATIENCE,
    REASON_VARIABLE,
    REQUEUED,
    Progress,
    describe,
    is_newly_held,
    is_orphan,
    watch_in_low_memory,
)
from shardmake.run.attempt import AttemptDir, SubmittedJob
from shardmake.run.notification import notify
from shardmake.run.paths import short_path

POLL_SECONDS = 1.0
LOW_MEMORY_SECONDS = 5.0
"""Pause between two queries from which on this process, of a Slurm job, is replaced by one of little memory."""
logger = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_UNKNOWN = "Slurm does not answer. The driver asks again; the job is not affected."


def watch(training: Training, job: SubmittedJob) -> JobStatus:
    """Wait until ``job`` has ended, or waits with failed ranks for a decision, and return its last status."""
    folder = training.attempt_dir(job.attempt)
    rundir = training.rundir
    files = (str(rundir.metrics), str(rundir.train_receipt), str(folder.log(0)), str(folder.root))
    progress = Progress(files[0], files[2], logger.info, logger.warning)
    ends = (
        f"the driver exits, job {job.id} keeps running. To watch the job, run the same command again. To save and "
        f"stop: touch {short_path(training.rundir.stop_file)}. To cancel: {training.jobs.cancel_command(job.id)}"
    )
    pause, last = POLL_SECONDS, JobState.UNKNOWN
    try:
        while (status := training.jobs.status(job.id)).state not in (JobState.ENDED, JobState.GONE):
            pause = POLL_SECONDS if status.state is not last else min(pause * 1.5, training.jobs.slowest_poll)
            if is_orphan():
                raise DriverStoppedError(KILLED)
            if last is JobState.RUNNING and status.state is JobState.PENDING:
                logger.info(REQUEUED)
            if status.state is not last:
                logger.info(
                    _UNKNOWN if status.state is JobState.UNKNOWN else describe(status.state.value, status.nodes)
                )
            last = status.state
            report_held(training, job, status)
            if status.name == "RUNNING":  # not suspended, and not ending
                record_lost_nodes(training.jobs, folder, status.nodes)
                if waits_for_driver(folder):
                    break
                end_job_without_script(training.jobs, folder, job.id)
            is_ending = status.state is JobState.UNKNOWN or folder.exits()
            if training.uses_slurm and pause >= LOW_MEMORY_SECONDS and not is_ending:
                progress.hand_over()
                watch_in_low_memory(
                    job.id, last.value, files, ends, training.lock, str(waiting_snapshot()),
                    quiet=not logger.isEnabledFor(logging.INFO),
                )  # fmt: skip
            _report_progress(training, progress, folder, pause)
    except DriverStoppedError as signal_name:
        logger.info("%s: %s", signal_name, ends)
        raise
    progress.poll()
    return status


def report_held(training: Training, job: SubmittedJob, status: JobStatus) -> None:
    """Report, and notify, once that a pending job waits for a person. The driver continues to wait for its start."""
    seconds = PATIENCE if os.environ.pop(REASON_VARIABLE, None) == status.nodes else 0.0
    if status.state is JobState.PENDING and is_newly_held(job.id, status.nodes, seconds):
        os.environ[HELD_VARIABLE] = job.id
        message = held_message(job.id, status, seconds)
        logger.warning(message)
        notify(training.run, training.rundir, "train", "held", message)


def _report_progress(training: Training, progress: Progress, folder: AttemptDir, seconds: float) -> None:
    """Report progress from the run's folder, which costs Slurm nothing, for ``seconds`` or until the attempt ends."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError):  # a shared file system may fail for a moment
            progress.poll()
            if training.rundir.train_receipt.exists() or folder.exits():
                wait_until(lambda: waits_for_driver(folder), POLL_SECONDS, POLL_SECONDS / 4)
                return
        time.sleep(POLL_SECONDS / 2)


class DriverStoppedError(KeyboardInterrupt):
    """Ctrl-C or a signal ended the driver; its text is the signal's name."""


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raise `DriverStoppedError` on each signal that ends a driver, unless the process ignores it (nohup)."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise DriverStoppedError(signal.Signals(number).name)

    handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
