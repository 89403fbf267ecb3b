"""The last event of a run, from the times of the records in its folder."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

from shardmake.checkpoint import store
from shardmake.core.units import format_duration
from shardmake.run.attempt import SubmittedJob
from shardmake.run.attempt_history import load_history
from shardmake.run.paths import RunDir


@dataclass(frozen=True)
class Event:
    """Something that happened to a run; ``time`` is Unix time."""

    time: float
    text: str

    def __str__(self) -> str:
        return f"{self.text}, {format_duration(max(0.0, time.time() - self.time))} ago"


def last_event(rundir: RunDir) -> Event | None:
    """Return the last event of a run; None if no stage of it has finished."""
    return max(_events(rundir), key=lambda event: event.time, default=None)


def _events(rundir: RunDir) -> Iterator[Event]:
    for path in rundir.settings.glob("*.json"):
        yield Event(path.stat().st_mtime, f"{path.stem} finished")
    for attempt in load_history(rundir.attempt_history)[-1:]:
        yield Event(attempt.ended, f"attempt {attempt.attempt} ended: {attempt.end}")
    if job := SubmittedJob.read_if_exists(rundir.job):
        yield Event(job.submitted, f"job {job.id} submitted")
    for record, path in itertools.islice(store.committed(rundir.checkpoints), 1):
        yield Event(path.stat().st_mtime, f"checkpoint of step {record.step:,}")
    if rundir.stop_file.exists():
        yield Event(rundir.stop_file.stat().st_mtime, "stop requested")
    if rundir.report.exists():
        yield Event(rundir.report.stat().st_mtime, "report written")
