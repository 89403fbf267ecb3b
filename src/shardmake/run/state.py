"""The state of a run, and what the files of its training say about its progress. Nothing is written or locked."""

import contextlib
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import Field

from shardmake.core.units import format_duration
from shardmake.run.attempt import Heartbeat
from shardmake.run.length import optimizer_steps
from shardmake.run.metrics import MetricsLine, parse_metrics
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from shardmake.run.receipts import DataReceipt
from shardmake.run.record import RunRecord
from shardmake.run.training_settings import ScriptProgram, TrainingSettings

_TAIL_BYTES = 1 << 16
_DRIVER = re.compile(r"process (\d+) on (\S+)")


@dataclass(frozen=True)
class Event:
    """Something that happened to a run; ``time`` is Unix time."""

    time: float
    text: str

    def __str__(self) -> str:
        return f"{self.text}, {format_duration(time.time() - self.time)} ago"


class DriverJobStatus(RunRecord):
    """State of the driver jobs of the workflow that was submitted last for a run."""

    job: str | None = Field(description="Id of the driver job that runs, waits, or was the last to start.")
    state: Literal["running", "pending", "done", "failed", "cancelled", "killed", "unknown"] = Field(
        description="`killed`: it ended and recorded nothing. `unknown`: Slurm does not answer."
    )
    nodes: str = Field("", description="Its node; while it waits, Slurm's reason in parentheses.")
    log: str = Field(description="Output of all driver jobs of the workflow.")


class RunState(RunRecord):
    """The state of one run: an entry of what ``shardmake status --json`` prints. A value that is not known is null."""

    run: str = Field(description="Name of the run.")
    stage: str = Field(
        "", description="Stage that is in progress or next; `done` after the last one, empty if the run cannot be read."
    )
    state: str = Field(description="State of the run, in words.")
    step: int | None = Field(None, description="Last optimizer step.")
    total: int | None = Field(None, description="Optimizer steps of the whole training.")
    loss: float | None = Field(None, description="Last logged loss.")
    tokens_per_second: float | None = Field(None, description="Last logged speed of all ranks.")
    step_seconds: float | None = Field(None, description="Median seconds of the last steps.")
    seconds_left: float | None = Field(None, description="Seconds until the last step at that speed.")
    queue: str | None = Field(
        None, description="State of the training's job in the queue, and its nodes or why it waits."
    )
    expected_start: float | None = Field(None, description="Unix time at which Slurm expects to start the job.")
    last_event: Event | None = Field(None, description="Newest event.")
    stages: dict[str, str] = Field(
        {},
        description="State of each stage: done, changed, outdated or open; without a result also queued, running, "
        "failed, cancelled or unfinished.",
    )
    driver_job: DriverJobStatus | None = Field(
        None,
        description="Driver jobs of the workflow that was submitted last for the run, if `shardmake submit` was used.",
    )
    changes: dict[str, list[str]] = Field({}, exclude=True, description="Settings that changed since each stage ran.")
    headline: str = Field("", exclude=True, description="State of a training without progress, in more words.")
    details: list[str] = Field([], exclude=True, description="Sentences about a training that has not finished.")

    def progress(self) -> str:
        """Return step, loss, speed and time left, as far as they are known; empty before the first step."""
        if self.step is None:
            return ""
        total = "" if self.total is None else f" of {self.total:,} ({self.step / self.total:.0%})"
        parts = [f"step {self.step:,}{total}"]
        parts += [] if self.loss is None else [f"loss {self.loss:.4g}"]
        parts += [] if self.tokens_per_second is None else [f"{self.tokens_per_second:,.0f} tokens/s"]
        parts += [] if self.step_seconds is None else [f"{self.step_seconds:.3g} s a step"]
        parts += [] if self.seconds_left is None else [f"about {format_duration(self.seconds_left)} left"]
        return ", ".join(parts)


def read_progress(rundir: RunDir, beat: Heartbeat) -> dict[str, Any]:
    """Return the fields of `RunState` from ``step`` to ``seconds_left``; ``beat`` is rank 0's heartbeat."""
    lines, total = read_tail(rundir.metrics), total_steps(rundir)
    step = max([beat.step, *(line.step for line in lines[-1:])])
    seconds = beat.median_step_seconds if beat.median_step_seconds > 0 else None
    logged = {key: value for line in lines for key, value in line if value is not None}
    return {
        "step": step, "total": total, "loss": logged.get("loss"), "tokens_per_second": logged.get("tokens_per_second"),
        "step_seconds": seconds, "seconds_left": None if total is None or seconds is None else (total - step) * seconds,
    }  # fmt: skip


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
    return optimizer_steps(epochs, data.train.sequences, plan.choice.global_batch_size)


def read_tail(metrics: Path) -> list[MetricsLine]:
    """Return the last lines of a metrics file, which may be long."""
    if not metrics.exists():
        return []
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
        return parse_metrics(file.read().decode(errors="replace"))


def living_driver(rundir: RunDir) -> str | None:
    """Return the driver that the lock file names if its process runs on this machine."""
    named = _DRIVER.search(rundir.driver_lock.read_text()) if rundir.driver_lock.exists() else None
    if named is None or named[2] != socket.gethostname():
        return None
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(int(named[1]))
        if any("shardmake" in word for word in process.cmdline()) and process.pid != os.getpid():
            return named[0]
    return None
