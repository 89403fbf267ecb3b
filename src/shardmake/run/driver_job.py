"""Records of a workflow in driver jobs: Slurm jobs, one after the other, in which Snakemake and the drivers run."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import Field

from shardmake.core.errors import ShardmakeError, StopRequestedError
from shardmake.run.paths import BelowRoot, numbered_paths
from shardmake.run.record import RunFile

VARIABLE: Final = "SHARDMAKE_DRIVER_JOB"
"""Environment variable with the folder of the `Workflow`, for every process of a driver job and for its jobs."""
FOLDER: Final = ".driver"
"""Folder below that of the runs; each workflow that was submitted has one in it."""
End = Literal["done", "failed", "cancelled", "continued"]


class Workflow(RunFile):
    """A workflow that `shardmake submit` submitted (``workflow.json``); each of its driver jobs reads it."""

    made_by: ClassVar[str] = "shardmake submit"
    name: str = Field(description="Name of its driver jobs, and start of the names of the stages' jobs.")
    user: str = Field(description="User who submitted it.")
    runs: list[str] = Field(description="Names of the runs.")
    config: str = Field(description="File of the configuration, as it was merged when it was submitted.")
    arguments: list[str] = Field(description="Arguments of Snakemake, without files and values of the configuration.")
    offline: bool = Field(description="The driver job cannot reach the internet.")
    lead_seconds: int = Field(description="Seconds before the time limit at which a driver job hands over.")


class DriverState(RunFile):
    """State of the driver jobs (``state.json``)."""

    made_by: ClassVar[str] = "shardmake submit"
    jobs: list[str] = Field(description="Ids of the driver jobs that have started, oldest first.")
    host: str = Field("", description="Node of the last one, once it has started.")
    snakemake_started: bool = Field(False, description="Snakemake runs, or was killed and left locks and jobs.")
    interrupted: int = Field(0, description="Driver jobs in a row whose end interrupted the job of a stage.")
    end: End | None = Field(None, description="Why the last driver job ended; continued: another one continues.")


class EndedRun(RunFile):
    """A run that needs a person (``ended/RUN.json``); later driver jobs of the workflow leave it as it is."""

    made_by: ClassVar[str] = "shardmake submit"
    stage: str = Field(description="Stage that ended.")
    event: Literal["stopped", "failed"] = Field(description="Stopped on request, or failed.")
    message: str = Field(description="Why.")
    time: float = Field(description="Unix time.")


@dataclass(frozen=True)
class DriverDir:
    """The folder of a submitted workflow, ``runs/.driver/NNN``."""

    root: Path

    workflow = BelowRoot("workflow.json", "What was submitted.")
    script = BelowRoot("script.sh", "Batch script of every driver job.")
    state = BelowRoot("state.json", "State of the driver jobs.")
    log = BelowRoot("driver.log", "Output of Snakemake and of the drivers, of all driver jobs.")
    ended = BelowRoot("ended", "A file for each run that needs a person.")

    def ended_run(self, run: str) -> Path:
        """Return the file of a run that needs a person."""
        return self.ended / f"{run}.json"


def driver_dirs(runs: Path) -> Iterator[DriverDir]:
    """Yield the folders of submitted workflows below the folder ``runs``, the newest first."""
    for path in reversed(numbered_paths(runs / FOLDER).values()):
        if (path / "state.json").exists():
            yield DriverDir(path)


def new_driver_dir(runs: Path) -> DriverDir:
    """Create the next folder."""
    folder = DriverDir(runs / FOLDER / f"{max(numbered_paths(runs / FOLDER), default=0) + 1:03d}")
    folder.ended.mkdir(parents=True)
    return folder


def current_driver_dir() -> DriverDir | None:
    """Return the folder of the workflow that this process belongs to; None outside of driver jobs."""
    folder = os.environ.get(VARIABLE)
    return DriverDir(Path(folder)) if folder else None


def note_end(run: str, stage: str, event: Literal["stopped", "failed"], message: str) -> None:
    """Record in a driver job that a stage of ``run`` ended and needs a person."""
    if folder := current_driver_dir():
        EndedRun(stage=stage, event=event, message=message, time=time.time()).write(folder.ended_run(run))


def refuse_ended(run: str) -> None:
    """Raise in a driver job the error of a stage of ``run`` that ended in an earlier driver job of the same workflow.

    A driver job that continues the work of another one must not start again what a person stopped or has to fix.
    """
    folder = current_driver_dir()
    ended = EndedRun.read_if_exists(folder.ended_run(run)) if folder else None
    if ended is None:
        return
    again = f"To start it again: shardmake cancel {run} --driver, then shardmake submit."
    if ended.event == "stopped":
        raise StopRequestedError(f"{run} stays stopped. {again}")
    raise ShardmakeError(f"{run} is left as it is, because its stage {ended.stage} failed: {ended.message} {again}")
