"""The state of a run's training, from the files that its processes leave and one query of Slurm.

Nothing is written, locked or imported that a running training uses.
"""

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardmake.core.errors import SlurmError
from shardmake.core.units import format_duration
from shardmake.launch.jobs import LocalJobs, job_name
from shardmake.launch.slurm_jobs import list_jobs
from shardmake.launch.slurm_states import JobState, JobStatus, held_message
from shardmake.launch.submission_check import parse_start
from shardmake.run.attempt import AttemptDir, Heartbeat, SubmittedJob
from shardmake.run.attempt_history import BY_PERSON, AttemptRecord, load_history
from shardmake.run.metrics import MetricsLine, parse_metrics
from shardmake.run.paths import RunDir, short_path
from shardmake.run.plan import Plan
from shardmake.run.receipts import DataReceipt
from shardmake.run.training_settings import ScriptProgram, TrainingSettings

_TAIL_BYTES = 1 << 16
_FRESH_SECONDS = 45.0
_DRIVER = re.compile(r"process (\d+) on (\S+)")


@dataclass(frozen=True)
class Progress:
    """How far a training has come. What is not known yet is None."""

    step: int
    total: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    """Median seconds of the last steps."""

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step at the present speed."""
        if self.total is None or self.step_seconds is None:
            return None
        return (self.total - self.step) * self.step_seconds

    def __str__(self) -> str:
        """Return step, loss, speed and time left, as far as they are known."""
        total = "" if self.total is None else f" of {self.total:,} ({self.step / self.total:.0%})"
        parts = [f"step {self.step:,}{total}"]
        parts += [] if self.loss is None else [f"loss {self.loss:.4g}"]
        parts += [] if self.tokens_per_second is None else [f"{self.tokens_per_second:,.0f} tokens/s"]
        parts += [] if self.step_seconds is None else [f"{self.step_seconds:.3g} s a step"]
        parts += [] if self.seconds_left is None else [f"about {format_duration(self.seconds_left)} left"]
        return ", ".join(parts)


@dataclass(frozen=True)
class TrainingState:
    """A training that has not finished: a headline, further lines, and the same in parts."""

    headline: str
    details: tuple[str, ...] = ()
    progress: Progress | None = None
    queue: str = ""
    """The job's state in the queue; empty without a job."""
    starts: float | None = None
    """Unix time at which Slurm expects to start a pending job; None without an estimate."""

    @property
    def state(self) -> str:
        """The headline without what the other fields have."""
        if self.progress:
            return "training"
        return "waits in the queue" if self.queue.startswith(JobState.PENDING.value) else self.headline


def query_queue(rundirs: Iterable[RunDir]) -> Mapping[str, JobStatus] | None:
    """Return the jobs of these runs in Slurm's queue by id, of all users; None if Slurm does not answer."""
    names = ",".join(job_name(rundir.root) for rundir in rundirs)
    with contextlib.suppress(SlurmError):
        return list_jobs("list the jobs of the runs", f"--name={names}")
    return None


def training_state(rundir: RunDir, *, slurm: bool, queue: Mapping[str, JobStatus] | None) -> TrainingState | None:
    """Return the state of a training that has begun and not finished; None before its first attempt.

    ``queue`` is the answer of `query_queue`, for a cluster with ``slurm``.
    """
    job = SubmittedJob.read_if_exists(rundir.job)
    history = load_history(rundir.attempt_history)
    if job is not None:
        return _with_job(rundir, job, _status(rundir, job, queue) if slurm else LocalJobs(rundir.root).status(job.id))
    if driver := living_driver(rundir):
        return TrainingState("no job yet", (f"The driver ({driver}) waits, or prepares the next attempt.",))
    return _ended(rundir, history[-1]) if history else None


def _status(rundir: RunDir, job: SubmittedJob, queue: Mapping[str, JobStatus] | None) -> JobStatus:
    """Return the state of a Slurm job; one that is not in the queue has ended."""
    if queue is None:
        return JobStatus(JobState.UNKNOWN)
    found = queue.get(job.id)
    return found if found and found.job_name == job_name(rundir.root) else JobStatus(JobState.GONE)


def _with_job(rundir: RunDir, job: SubmittedJob, status: JobStatus) -> TrainingState:
    """Return the state of a training that has a job."""
    name = f"job {job.id} (attempt {job.attempt})"
    if status.state is JobState.PENDING:
        return _pending(job, status, name)
    beat = next(iter(AttemptDir(rundir.attempts / f"{job.attempt:03d}").node_beats(0)), None)
    is_alive = beat is not None and time.time() - beat.time < _FRESH_SECONDS  # as on another machine than this one
    if status.state in (JobState.ENDED, JobState.GONE) and not is_alive:
        advice = "A driver that is running records why; if there is none, run the same command again."
        return TrainingState(f"{name} has ended", (advice, *_last_step(rundir)))
    where = f" on {status.nodes}" if status.nodes else ""
    unknown = ("Slurm does not answer.",) if status.state is JobState.UNKNOWN else ()
    if beat is None:
        details = (f"The ranks of {name}{where} have not reported yet.", *unknown)
        return TrainingState("starting", details, queue=_queue(status))
    age = format_duration(max(0.0, time.time() - beat.time))
    lines = (f"As {name}{where}; last heartbeat {age} ago in phase {beat.phase}.", *_stop_request(rundir), *unknown)
    progress = read_progress(rundir, beat)
    return TrainingState(str(progress), lines, progress, _queue(status))


def _pending(job: SubmittedJob, status: JobStatus, name: str) -> TrainingState:
    """Return the state of a training whose job waits."""
    starts = parse_start(status.expected_start)
    if starts is None:
        estimate = "Slurm does not know when it will start."
    else:
        estimate = f"Slurm expects to start it in {format_duration(max(0, starts - time.time()))}."
    waited = format_duration(time.time() - job.submitted)
    held = held_message(job.id, status)
    return TrainingState(
        f"waits in the queue: {status.nodes}",
        (f"Submitted {waited} ago as {name}. {held or estimate}",),
        queue=_queue(status),
        starts=starts,
    )


def _queue(status: JobStatus) -> str:
    """Return the state of a job in the queue: its state, and its nodes or the reason why it waits."""
    if status.state is JobState.UNKNOWN:
        return "Slurm does not answer"
    return " ".join(filter(None, (status.state.value, status.nodes)))


def read_progress(rundir: RunDir, beat: Heartbeat) -> Progress:
    """Return how far the ranks have come, from rank 0's heartbeat and the last lines of metrics."""
    lines = read_tail(rundir.metrics)
    losses = [line.loss for line in lines if line.loss is not None]
    rates = [line.tokens_per_second for line in lines if line.tokens_per_second is not None]
    return Progress(
        step=max([beat.step, *(line.step for line in lines[-1:])]),
        total=total_steps(rundir),
        loss=losses[-1] if losses else None,
        tokens_per_second=rates[-1] if rates else None,
        step_seconds=beat.median_step_seconds if beat.median_step_seconds > 0 else None,
    )


def _stop_request(rundir: RunDir) -> tuple[str, ...]:
    if not rundir.stop_file.exists():
        return ()
    return (
        f"A stop was requested ({short_path(rundir.stop_file)}): the ranks save and stop after their current step.",
    )


def _ended(rundir: RunDir, last: AttemptRecord) -> TrainingState:
    """Return the state of a training whose last attempt has ended, and which no driver continues."""
    if last.end in BY_PERSON:
        return TrainingState("stopped on request", (last.message,))
    continues = last.next_fallback is not None
    logs = short_path(rundir.attempts / f"{last.attempt:03d}")
    following = "The same command resumes the training, unless a driver on another machine does"
    return TrainingState(
        f"between two attempts: {last.end}" if continues else f"failed: {last.end}",
        (
            f"Attempt {last.attempt} (job {last.job}) ended: {last.message}",
            *_last_step(rundir),
            f"Logs: {logs}. {following}.",
        ),
    )


def _last_step(rundir: RunDir) -> tuple[str, ...]:
    """Return the last logged step and the newest checkpoint."""
    lines = read_tail(rundir.metrics)
    saved = max((int(path.name.split("-")[1]) for path in rundir.checkpoints.glob("checkpoint-[0-9]*")), default=None)
    logged = f"The last logged step is {lines[-1].step:,}. " if lines else ""
    return (
        f"{logged}The newest checkpoint is of step {saved:,}." if saved else f"{logged}There is no checkpoint yet.",
    )


def total_steps(rundir: RunDir) -> int | None:
    """Return the number of optimizer steps of the whole training; None for a user's script, which decides itself."""
    settings, plan = TrainingSettings.read_if_exists(rundir.training), Plan.read_if_exists(rundir.plan)
    if settings is None or plan is None or isinstance(settings.program, ScriptProgram):
        return None
    if steps := settings.arguments.get("max_steps"):
        return int(steps)
    data, epochs = DataReceipt.read_if_exists(rundir.data_receipt), settings.arguments.get("num_train_epochs")
    if data is None or epochs is None:
        return None
    return max(1, round(epochs * data.train.sequences / plan.choice.global_batch_size))


def read_tail(metrics: Path) -> list[MetricsLine]:
    """Return the last lines of a metrics file, which may be long."""
    if not metrics.exists():
        return []
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
        return parse_metrics(file.read().decode(errors="replace"))


def living_driver(rundir: RunDir) -> str | None:
    """Return the driver that the lock file names if its process runs on this machine."""
    lock = rundir.train / "driver.lock"
    named = _DRIVER.search(lock.read_text()) if lock.exists() else None
    if named is None or named[2] != socket.gethostname():
        return None
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(int(named[1]))
        if any("shardmake" in word for word in process.cmdline()) and process.pid != os.getpid():
            return named[0]
    return None
