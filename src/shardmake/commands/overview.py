"""The runs of a configuration in one table: `shardmake status` without a name, and `shardmake list`. Read-only."""

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from shardmake.commands.driver_state import DriverJobStatus, driver_jobs
from shardmake.commands.last_event import Event, last_event
from shardmake.commands.status import CHANGED, DONE, Queue, Stages, queue_of, stage_states, unfinished_training
from shardmake.commands.text_table import print_table, rich_table
from shardmake.commands.training_state import Progress
from shardmake.config.effects import as_text
from shardmake.config.models import Cluster, Config, Run
from shardmake.core.errors import ConfigError, ShardmakeError
from shardmake.core.units import format_duration
from shardmake.run.paths import RunDir
from shardmake.run.record import RunRecord

REFRESH_SECONDS: Final = 10.0
"""Seconds between two screens of ``--watch``; each one asks Slurm once for all runs."""
STATUS_HEADERS: Final = ("run", "stage", "state", "step", "loss", "tokens/s", "left", "queue", "starts", "last event")
LIST_HEADERS: Final = ("run", "sweep", "model", "data", "stage")


@dataclass(frozen=True)
class RunRow:
    """The state of one run."""

    run: str
    stage: str
    """The stage that is in progress or next; `done` after the last one, and empty if the run cannot be read."""
    state: str
    progress: Progress | None = None
    queue: str = ""
    starts: float | None = None
    """Unix time at which Slurm expects to start the job."""
    event: Event | None = None
    stages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The state of each stage."""

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table with `STATUS_HEADERS`."""
        at = self.progress
        total = "" if at is None or at.total is None else f"/{at.total:,}"
        return (
            self.run,
            self.stage,
            self.state,
            "" if at is None else f"{at.step:,}{total}",
            "" if at is None or at.loss is None else f"{at.loss:.4g}",
            "" if at is None or at.tokens_per_second is None else f"{at.tokens_per_second:,.0f}",
            "" if at is None or at.seconds_left is None else format_duration(at.seconds_left),
            self.queue,
            "" if self.starts is None else datetime.fromtimestamp(self.starts).strftime("%Y-%m-%d %H:%M"),
            "" if self.event is None else str(self.event),
        )

    def as_json(self, driver_job: DriverJobStatus | None = None) -> Any:
        """Return the row and the run's driver jobs as JSON data."""
        at = self.progress
        return RunStatus(
            run=self.run,
            stage=self.stage,
            state=self.state,
            **(dataclasses.asdict(at) if at else {}),
            seconds_left=at.seconds_left if at else None,
            queue=self.queue or None,
            expected_start=self.starts,
            last_event=self.event,
            stages=dict(self.stages),
            driver_job=driver_job,
        ).as_json()


class RunStatus(RunRecord):
    """The state of one run: an entry of what ``shardmake status --json`` prints. A value that is not known is null."""

    run: str = Field(description="Name of the run.")
    stage: str = Field(
        description="Stage that is in progress or next; `done` after the last one, empty if the run cannot be read."
    )
    state: str = Field(description="State of the run, in words.")
    step: int | None = Field(None, description="Last optimizer step.")
    total: int | None = Field(None, description="Optimizer steps of the whole training.")
    loss: float | None = Field(None, description="Last logged loss.")
    tokens_per_second: float | None = Field(None, description="Last logged speed of all ranks.")
    step_seconds: float | None = Field(None, description="Median seconds of the last steps.")
    seconds_left: float | None = Field(None, description="Seconds until the last step at that speed.")
    queue: str | None = Field(description="State of the training's job in the queue, and its nodes or why it waits.")
    expected_start: float | None = Field(description="Unix time at which Slurm expects to start the job.")
    last_event: Event | None = Field(description="Newest event.")
    stages: dict[str, str] = Field(description="State of each stage: done, changed, outdated or open.")
    driver_job: DriverJobStatus | None = Field(
        description="Driver jobs of the workflow that was submitted last for the run, if `shardmake submit` was used."
    )


def status_json(config: Config, cluster: Cluster, runs: Path) -> list[Any]:
    """Return what ``shardmake status --json`` prints: a `RunStatus` for each run of the configuration."""
    drivers = driver_jobs(runs, config.runs) if cluster.executor == "slurm" else {}
    return [row.as_json(drivers.get(row.run)) for row in status_rows(config, cluster, runs)]


def status_rows(config: Config, cluster: Cluster, runs: Path) -> list[RunRow]:
    """Return a row for each run of the configuration. A run whose files cannot be read gets the reason."""
    rundirs = {name: RunDir(runs / name) for name in config.runs}
    queue = queue_of(rundirs.values(), cluster)
    return [_read_row(config.runs[name], cluster, rundir, queue) for name, rundir in rundirs.items()]


def _read_row(run: Run, cluster: Cluster, rundir: RunDir, queue: Queue) -> RunRow:
    try:
        return status_row(run, cluster, rundir, queue)
    except (ShardmakeError, OSError) as error:
        return RunRow(rundir.name, "", f"cannot be read: {error}")


def status_row(run: Run, cluster: Cluster, rundir: RunDir, queue: Queue) -> RunRow:
    """Return the row of a run; ``queue`` is the answer of `queue_of`."""
    stages, event = stage_states(run, cluster, rundir), last_event(rundir)
    states = {stage: state for stage, (state, _) in stages.items()}
    if training := unfinished_training(cluster, rundir, queue):
        at = training.progress
        return RunRow(rundir.name, "train", training.state, at, training.queue, training.starts, event, states)
    stage, state = _next_stage(stages)
    return RunRow(rundir.name, stage, state, event=event, stages=states)


def _next_stage(stages: Stages) -> tuple[str, str]:
    """Return the stage that is next, and the run's state."""
    for stage, (state, changes) in stages.items():
        if state == CHANGED:
            return stage, f"changed since the last {stage}: {'; '.join(changes)}"
    unfinished = next((stage for stage, (state, _) in stages.items() if state != DONE), None)
    if unfinished is None:
        return DONE, DONE
    return unfinished, "not started" if unfinished == "fetch" else f"next step: {unfinished}"


def print_status(rows: list[RunRow]) -> None:
    """Print the rows as a table."""
    print_table(STATUS_HEADERS, [row.cells() for row in rows])


def watch(read: Callable[[], list[RunRow]]) -> None:
    """Show the rows that ``read`` returns on a screen that is renewed until Ctrl-C.

    Raises `ConfigError` if the output is not a terminal.
    """
    if not sys.stdout.isatty():
        raise ConfigError("--watch cannot be used: the output is not a terminal. Use `status` or `status --json`.")
    from rich.console import Group
    from rich.live import Live

    try:
        with Live(auto_refresh=False, screen=True) as live:
            while True:
                now = f"{datetime.now():%H:%M:%S}, every {REFRESH_SECONDS:.0f} s; Ctrl-C ends it"
                live.update(Group(now, rich_table(STATUS_HEADERS, [row.cells() for row in read()])), refresh=True)
                time.sleep(REFRESH_SECONDS)
    except KeyboardInterrupt:
        return


class ListedRun(RunRecord):
    """One run in the configuration or in the folder of runs: an entry of what ``shardmake list --json`` prints."""

    run: str = Field(description="Name of the run.")
    sweep: str = Field("", description="Sweep that the run is a point of.")
    model: str = Field("", description="Model that it starts from.")
    data: str = Field("", description="Sources of the training data.")
    stage: str = Field("", description="Stage that is in progress or next, or that the configuration lacks the run.")

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table with `LIST_HEADERS`."""
        return (self.run, self.sweep, self.model, self.data, self.stage)


def list_runs(config: Config, cluster: Cluster, runs: Path) -> list[ListedRun]:
    """Return the runs of the configuration, and after them folders of runs that it does not have."""
    sweep_of = {point: sweep for sweep, points in config.sweeps.items() for point in points}
    listed = []
    for name, run in config.runs.items():
        train = run.data.train
        sources = [train] if isinstance(train, str) else [part.source for part in train]
        model, data = as_text(run.model), ", ".join(map(as_text, sources))
        try:
            stage = _next_stage(stage_states(run, cluster, RunDir(runs / name)))[0]
        except (ShardmakeError, OSError):
            stage = "cannot be read"
        listed.append(ListedRun(run=name, sweep=sweep_of.get(name, ""), model=model, data=data, stage=stage))
    folders = sorted(path.name for path in runs.glob("[!.]*/") if path.is_dir())
    return listed + [
        ListedRun(run=name, stage="not in the configuration") for name in folders if name not in config.runs
    ]
