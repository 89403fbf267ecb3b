"""Watch a job until it ends, and report its state and progress."""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from shardmake.launch.low_memory_wait import HELD_VARIABLE, is_newly_held, wait_until_started
from shardmake.launch.service import loading_message
from shardmake.launch.slurm_jobs import waiting_snapshot
from shardmake.launch.slurm_states import JobState, JobStatus, held_message
from shardmake.launch.training import Training
from shardmake.run.attempt import AttemptDir, SubmittedJob
from shardmake.run.metrics import MetricsLine, parse_metrics
from shardmake.run.notification import notify
from shardmake.run.paths import short_path

POLL_SECONDS = 1.0
LOW_MEMORY_WAIT_SECONDS = 5.0
logger = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS_BETWEEN_LINES = 3.0
SECONDS_BETWEEN_LOADING_LINES = 60.0
_WARNING = "[rank 0] WARNING: "
"""Begin of a warning of rank 0, by `shardmake.core.log`."""


class AppendedLines:
    """The lines that are appended to a file from now on.

    A resumed attempt rewrites its metrics. If the file has grown again by the next call, reading starts inside a line.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.offset = file.stat().st_size if file.exists() else 0

    def read(self) -> list[str]:
        """Return the complete lines since the last call. After the file was shortened, reading starts at its end."""
        if not self.file.exists():
            return []
        if self.file.stat().st_size < self.offset:
            self.offset = self.file.stat().st_size
        with self.file.open("rb") as file:
            file.seek(self.offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        self.offset += len(complete) + len(newline)
        return complete.decode(errors="replace").splitlines()


class ProgressPrinter:
    """Logs what an attempt appends to its metrics, at a readable pace, and rank 0's warnings, at once."""

    def __init__(self, metrics: Path, log: Path) -> None:
        self.metrics = AppendedLines(metrics)
        self.log = AppendedLines(log)
        self.logged_at = 0.0

    def poll(self) -> None:
        """Log new warnings and evaluations, and the newest step if enough time has passed."""
        for text in self.log.read():
            if text.startswith(_WARNING):
                logger.warning(text.removeprefix(_WARNING))
        lines = parse_metrics("\n".join(self.metrics.read()))
        for line in lines:
            if line.eval_loss is not None:
                logger.info("step %6s  evaluation loss %.4f", line.step, line.eval_loss)
        steps = [line for line in lines if line.loss is not None]
        if steps and time.monotonic() - self.logged_at >= SECONDS_BETWEEN_LINES:
            self.logged_at = time.monotonic()
            logger.info(_describe_step(steps[-1]))


class LoadingPrinter:
    """Logs now and then that a service of the attempt still loads."""

    def __init__(self, folder: AttemptDir) -> None:
        self.folder = folder
        self.logged_at = time.monotonic()

    def poll(self) -> None:
        """Log the line if enough time has passed."""
        if time.monotonic() - self.logged_at < SECONDS_BETWEEN_LOADING_LINES:
            return
        self.logged_at = time.monotonic()
        attempt = self.folder.read()
        if attempt.service_nodes and (message := loading_message(self.folder, attempt, time.time())):
            logger.info(message)


def _describe_step(line: MetricsLine) -> str:
    speed = "" if line.tokens_per_second is None else f"  {line.tokens_per_second:,.0f} tokens/s"
    rate = "" if line.learning_rate is None else f"  learning rate {line.learning_rate:.2e}"
    return f"step {line.step:>6}  loss {line.loss:.4f}{rate}{speed}"


def _describe_status(status: JobStatus) -> str:
    """Return the state of a job in a sentence, with its nodes or the reason why it waits, if Slurm gives one."""
    if status.state is JobState.UNKNOWN:
        return "Slurm does not answer. The driver asks again; the job is not affected."
    preposition = "on " if status.state is JobState.RUNNING else ""
    known = "" if status.nodes in ("", "(None)") else f" {preposition}{status.nodes}"
    return f"The job is {status.state.value}{known}."


def watch(training: Training, job: SubmittedJob) -> JobStatus:
    """Wait until ``job`` has ended, and return its last status."""
    folder = training.attempt_dir(job.attempt)
    progress, loading = ProgressPrinter(training.rundir.metrics, folder.log(0)), LoadingPrinter(folder)
    pause, last = POLL_SECONDS, JobState.UNKNOWN
    try:
        while (status := training.jobs.status(job.id)).state not in (JobState.ENDED, JobState.GONE):
            pause = POLL_SECONDS if status.state is not last else min(pause * 1.5, training.jobs.slowest_poll)
            if last is JobState.RUNNING and status.state is JobState.PENDING:
                logger.info("Slurm put the job back into the queue. It will resume from its newest checkpoint.")
            if status.state is not last:
                logger.info(_describe_status(status))
            last = status.state
            report_held(training, job, status)
            if status.name == "PENDING" and pause >= LOW_MEMORY_WAIT_SECONDS:
                # A pending job may wait for days: replace this process by one of little memory.
                logger.info("%s The driver waits in low memory until it starts.", _describe_status(status))
                wait_until_started(job.id, training.lock, str(waiting_snapshot()))
            _report_progress(training, [progress, loading], folder, pause)
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


def report_held(training: Training, job: SubmittedJob, status: JobStatus) -> None:
    """Report, and notify, once that a pending job waits for a person. The driver continues to wait for its start."""
    if status.state is JobState.PENDING and is_newly_held(job.id, status.nodes):
        os.environ[HELD_VARIABLE] = job.id
        message = held_message(job.id, status)
        logger.warning(message)
        notify(training.run, training.rundir, "train", "held", message)


def _report_progress(
    training: Training, printers: Sequence[ProgressPrinter | LoadingPrinter], folder: AttemptDir, seconds: float
) -> None:
    """Report progress from the run's folder, which costs Slurm nothing, for ``seconds`` or until the attempt ends."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError):  # a shared file system may fail for a moment
            for printer in printers:
                printer.poll()
            if training.rundir.train_receipt.exists() or folder.exits():
                time.sleep(POLL_SECONDS)
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
