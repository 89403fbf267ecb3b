"""History of a training over its attempts: metrics by step, time by attempt, time lost between attempts."""

from dataclasses import dataclass
from itertools import pairwise

from shardmake.run.attempt import AttemptDir
from shardmake.run.attempt_history import load_history
from shardmake.run.metrics import MetricsLine, read_metrics
from shardmake.run.paths import RunDir


@dataclass(frozen=True)
class Span:
    """One attempt: Unix times, ranks, devices of the job, why it ended, and the metrics of its steps that count."""

    number: int
    started: float
    ended: float
    world_size: int
    devices: int
    end: str
    lines: list[MetricsLine]

    @property
    def device_hours(self) -> float:
        """Hours of all devices, from the start of the job to its end."""
        return self.devices * (self.ended - self.started) / 3600


@dataclass(frozen=True)
class Interruption:
    """Cost of an interruption: seconds from the last step that counts to the next new one, queueing included."""

    after_step: int
    seconds: float
    why: str


@dataclass(frozen=True)
class TrainingHistory:
    """The attempts of a training, in order."""

    spans: list[Span]

    @property
    def lines(self) -> list[MetricsLine]:
        """The metrics of all attempts."""
        return [line for span in self.spans for line in span.lines]

    @property
    def hours(self) -> float:
        """Hours in which the job ran."""
        return sum(span.ended - span.started for span in self.spans) / 3600

    @property
    def device_hours(self) -> float:
        """Hours of all devices."""
        return sum(span.device_hours for span in self.spans)

    @property
    def interruptions(self) -> list[Interruption]:
        """One between each attempt that left steps and the next that made some, if both logged the time."""
        working = [span for span in self.spans if span.lines]
        ends = [(a.lines[-1], b.lines[0], a.end) for a, b in pairwise(working)]
        return [
            Interruption(last.step, first.time - last.time, why)
            for last, first, why in ends
            if first.time is not None and last.time is not None
        ]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return steps and values of one metric, for steps that logged it."""
        found = [(line.step, value) for line in self.lines if (value := getattr(line, key)) is not None]
        return [step for step, _ in found], [value for _, value in found]

    def by_tokens(self, key: str) -> tuple[list[int], list[float]]:
        """Return tokens and values of one metric, for steps that logged both."""
        found = [
            (line.tokens, value)
            for line in self.lines
            if line.tokens is not None and (value := getattr(line, key)) is not None
        ]
        return [tokens for tokens, _ in found], [value for _, value in found]


def read_history(rundir: RunDir) -> TrainingHistory:
    """Read the history of a run, without attempts that neither logged a step nor wrote an exit record."""
    ends = {record.attempt: record.end for record in load_history(rundir.attempt_history)}
    folders = sorted(rundir.attempts.glob("[0-9]*"))
    lines = _final_lines(read_metrics(rundir.metrics), int(folders[-1].name) if folders else 0)
    spans = [_span(AttemptDir(folder), [x for x in lines if x.attempt == int(folder.name)], ends) for folder in folders]
    return TrainingHistory([span for span in spans if span is not None])


def _final_lines(lines: list[MetricsLine], last_attempt: int) -> list[MetricsLine]:
    """Return the lines of the steps that count. A script may log a step again after it resumed, or name no attempt."""
    kept: list[MetricsLine] = []
    for line in reversed(lines):
        attempt = last_attempt if line.attempt is None else line.attempt
        if not kept or line.step < kept[-1].step or (line.step, attempt) == (kept[-1].step, kept[-1].attempt):
            kept.append(line.model_copy(update={"attempt": attempt}))
    return kept[::-1]


def _span(folder: AttemptDir, lines: list[MetricsLine], ends: dict[int, str]) -> Span | None:
    """Return an attempt with the times of the nodes' exit records, or else of the logged steps."""
    started = [record.started for record in folder.exits()] or [line.time for line in lines[:1] if line.time]
    ended = [record.ended for record in folder.exits()] or [line.time for line in lines[-1:] if line.time]
    if not started:
        return None
    number = int(folder.root.name)
    attempt, end = folder.read(), ends.get(number, "unknown")
    return Span(number, min(started), max(ended), attempt.world_size, attempt.devices, end, lines)


def attempt_of(rundir: RunDir, number: int) -> AttemptDir:
    """Return the folder of attempt ``number``."""
    return AttemptDir(rundir.attempts / f"{number:03d}")
