"""``shardmake list``: the runs of the configuration, and the folders of other runs, with size, age and owner."""

import contextlib
import pwd
import time
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from shardmake.commands.status import last_event, next_stage, stage_states
from shardmake.config.effects import as_text
from shardmake.config.models import Cluster, Config
from shardmake.core.disk import tree_size
from shardmake.core.errors import ShardmakeError
from shardmake.core.units import format_bytes, format_duration
from shardmake.run.paths import RunDir
from shardmake.run.record import RunRecord


class ListedRun(RunRecord):
    """One run in the configuration or in the folder of runs: an entry of what ``shardmake list --json`` prints."""

    run: str = Field(description="Name of the run.")
    sweep: str = Field("", description="Sweep that the run is a point of.")
    model: str = Field("", description="Model that it starts from.")
    data: str = Field("", description="Sources of the training data.")
    stage: str = Field("", description="Stage that is in progress or next, or that the configuration lacks the run.")
    size: int | None = Field(None, description="Bytes below the run's folder; files that runs share count in each.")
    last: float | None = Field(None, description="Unix time of the run's last event.")
    owner: str = Field("", description="User whose folder it is.")

    def cells(self) -> list[str]:
        """Return the row of the table, with the age of the last event."""
        size = "" if self.size is None else format_bytes(self.size)
        age = "" if self.last is None else format_duration(time.time() - self.last)
        return [self.run, self.sweep, self.model, self.data, self.stage, size, age, self.owner]


LISTED: Final = ("run", "sweep", "model", "data", "stage", "size", "age", "owner")
"""Columns of the list of runs."""


def list_runs(config: Config, cluster: Cluster, runs: Path) -> list[ListedRun]:
    """Return the runs of the configuration, and after them folders of runs that it does not have."""
    sweep_of = {point: sweep for sweep, points in config.sweeps.items() for point in points}
    listed = []
    for name, run in config.runs.items():
        train = run.data.train
        sources = [train] if isinstance(train, str) else [part.source for part in train]
        model, data = as_text(run.model), ", ".join(map(as_text, sources))
        try:
            stage = next_stage(stage_states(run, cluster, RunDir(runs / name)))[0]
        except (ShardmakeError, OSError):
            stage = "cannot be read"
        folder = _folder_facts(RunDir(runs / name))
        listed.append(ListedRun(run=name, sweep=sweep_of.get(name, ""), model=model, data=data, stage=stage, **folder))
    folders = sorted(path.name for path in runs.glob("[!.]*/") if path.is_dir())
    return listed + [
        ListedRun(run=name, stage="not in the configuration", **_folder_facts(RunDir(runs / name)))
        for name in folders
        if name not in config.runs
    ]


def _folder_facts(rundir: RunDir) -> dict[str, Any]:
    """Return size, last event and owner of a run's folder, if there is one."""
    if not rundir.root.is_dir():
        return {}
    found, event = rundir.root.stat(), None
    with contextlib.suppress(ShardmakeError, OSError):
        event = last_event(rundir)
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = str(found.st_uid)
    return {"size": tree_size(rundir.root), "last": event.time if event else found.st_mtime, "owner": owner}
