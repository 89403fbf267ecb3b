"""History of a training over its attempts: metrics by step, time by attempt, time lost between attempts."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardmake.run.attempt import AttemptDir
from shardmake.run.attempt_history import AttemptRecord, load_history
from shardmake.run.metrics import MetricsLine, read_metrics
from shardmake.run.paths import RunDir, numbered_paths


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
    is_repeated: bool = False
    """No step of the attempt counts, because a later attempt made them all."""

    @property
    def steps(self) -> str:
        """The steps that count, as text."""
        if self.lines:
            return f"{self.lines[0].step} to {self.lines[-1].step}"
        return "none" if self.is_repeated else "not logged"

    @property
    def device_hours(self) -> float:
        """Hours of all devices, from the start of the job to its end."""
        return self.devices * (self.ended - self.started) / 3600


@dataclass(frozen=True)
class Interruption:
    """Cost of an interruption: seconds from the last step that counts to the next new one, queueing included.

    If no step counts before it, the seconds are those from the first start to the start of the attempt that counts.
    """

    after_step: int
    """Last step that counts; 0 if there is none."""
    seconds: float
    why: str


@dataclass(frozen=True)
class TrainingHistory:
    """The attempts of a training, in order."""

    spans: list[Span]
    """Empty if the folders of the attempts were removed."""
    lines: list[MetricsLine]
    """The metrics of the steps that count, of all attempts."""

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
        """One before each attempt with steps that count, but the first attempt, if the times are known."""
        working = [index for index, span in enumerate(self.spans) if span.lines]
        lost, found = self.spans[: working[0]] if working else [], list[Interruption]()
        if lost and all(span.is_repeated for span in lost):  # it is known that no step of them counts
            found.append(Interruption(0, self.spans[len(lost)].started - lost[0].started, _ends(lost)))
        for before, after in pairwise(working):
            last, first = self.spans[before].lines[-1], self.spans[after].lines[0]
            if first.time is not None and last.time is not None:
                found.append(Interruption(last.step, first.time - last.time, _ends(self.spans[before:after])))
        return found

    def series(self, key: str, over: str = "step") -> tuple[list[int], list[float]]:
        """Return steps, or ``tokens`` in all, and values of one metric, for steps that logged it."""
        pairs = [(getattr(line, over), getattr(line, key)) for line in self.lines]
        found = [pair for pair in pairs if None not in pair]
        return [place for place, _ in found], [value for _, value in found]

    @property
    def speed(self) -> float | None:
        """The median of the logged tokens per second; None if none were logged."""
        return statistics.median(rates) if (rates := self.series("tokens_per_second")[1]) else None

    @property
    def step_seconds(self) -> float | None:
        """The median seconds of an optimizer step, from the logged tokens and their speed; None without them."""
        logged = [
            (line.attempt, line.step, line.tokens, line.tokens_per_second)
            for line in self.lines
            if line.tokens is not None and line.tokens_per_second
        ]
        found = [
            (tokens - last) / (step - before) / rate
            for (earlier, before, last, _), (attempt, step, tokens, rate) in pairwise(logged)
            if earlier == attempt and before < step
        ]
        return statistics.median(found) if found else None


def hours_name(*, on_gpus: bool) -> str:
    """Return the name of the hours of all devices: of GPUs, or of the processes that ran on CPUs."""
    return "GPU-hours" if on_gpus else "process-hours"


def _ends(spans: Sequence[Span]) -> str:
    return ", then ".join(span.end for span in spans)


def read_history(rundir: RunDir) -> TrainingHistory:
    """Read the history of a run, without attempts that neither logged a step nor wrote an exit record."""
    records, logged = load_history(rundir.attempt_history), read_metrics(rundir.metrics)
    ends = {record.attempt: record.end for record in records}
    folders = numbered_paths(rundir.attempts)
    lines = _final_lines(logged, max(folders, default=0))
    repeated = _repeated(logged, records)
    spans = [
        _span(AttemptDir(folder), [line for line in lines if line.attempt == number], ends, repeated)
        for number, folder in folders.items()
    ]
    return TrainingHistory([span for span in spans if span is not None], lines)


def _repeated(logged: Sequence[MetricsLine], records: Sequence[AttemptRecord]) -> set[int]:
    """Return the attempts none of whose steps count unless `_final_lines` has some of them.

    Such an attempt logged steps that a later one logged again, or it left no newer checkpoint than there was before.
    Nothing is known if a line names no attempt.
    """
    named = {line.attempt for line in logged}
    if not named or None in named:
        return set()
    found, newest = set(), 0
    for record in records:
        if record.attempt in named or record.checkpoint_step <= newest:
            found.add(record.attempt)
        newest = max(newest, record.checkpoint_step)
    return found


def _final_lines(lines: list[MetricsLine], last_attempt: int) -> list[MetricsLine]:
    """Return the lines of the steps that count. A script may log a step again after it resumed, or name no attempt."""
    kept: list[MetricsLine] = []
    for line in reversed(lines):
        attempt = last_attempt if line.attempt is None else line.attempt
        if not kept or line.step < kept[-1].step or (line.step, attempt) == (kept[-1].step, kept[-1].attempt):
            kept.append(line.model_copy(update={"attempt": attempt}))
    return kept[::-1]


def _span(
    folder: AttemptDir, lines: list[MetricsLine], ends: Mapping[int, str], repeated: Collection[int]
) -> Span | None:
    """Return an attempt with the times of the nodes' exit records, or else of the logged steps."""
    started = [record.started for record in folder.exits()] or [line.time for line in lines[:1] if line.time]
    ended = [record.ended for record in folder.exits()] or [line.time for line in lines[-1:] if line.time]
    if not started:
        return None
    number = int(folder.root.name)
    attempt, end = folder.read(), ends.get(number, "unknown")
    is_repeated = number in repeated and not lines
    return Span(number, min(started), max(ended), attempt.world_size, attempt.devices, end, lines, is_repeated)


def attempt_of(rundir: RunDir, number: int) -> AttemptDir:
    """Return the folder of attempt ``number``."""
    return AttemptDir(rundir.attempts / f"{number:03d}")
