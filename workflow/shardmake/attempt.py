"""One attempt at training: what the driver tells the worker and the ranks, and where they answer.

An attempt's folder holds ``attempt.json`` (written by the driver before the job is submitted), the rendezvous, a log
and an exit record per node, a report per rank, and the traceback of every rank that failed.
"""

import socket
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from shardmake.receipt import read_json, write_json
from shardmake.rundir import RunDir


class Record(BaseModel):
    """A value that one process writes as JSON and another reads."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Attempt(Record):
    """What the driver decided for one submission."""

    number: int = Field(description="1 for the first attempt of the run.")
    run_folder: str = Field(description="Absolute path of the run's folder.")
    nodes: int = Field(description="Nodes of the job.")
    processes_per_node: int = Field(description="Ranks per node.")
    cpus_per_node: int = Field(description="Cores of the job per node.")
    accelerator: str = Field(description="`cpu`, or the GPU model.")
    network_interface: str | None = Field(description="Interface for training traffic; None for the default route's.")
    scratch: str = Field(description="Node-local folder for caches.")
    offline: bool = Field(description="Whether the ranks must not ask the hub for anything.")
    resume_from: str | None = Field(description="Checkpoint to resume from, absolute; None to start afresh.")
    recipe: str = Field(description="Digest of the settings that define the result (`shardmake.train.recipe`).")
    rendezvous_seconds: float = Field(300, description="How long nodes wait for each other.")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.processes_per_node

    @property
    def rundir(self) -> RunDir:
        """The run's folder."""
        return RunDir(Path(self.run_folder))


class NodeExit(Record):
    """The last thing a worker writes: how its node's ranks ended."""

    node_rank: int = Field(description="Rank of the node in the job.")
    host: str = Field(description="Host name.")
    started: float = Field(description="Unix time at which the worker started.")
    ended: float = Field(description="Unix time at which it ended.")
    phase: str = Field(description="`rendezvous` or `training`: what was going on at the end.")
    returncode: int | None = Field(
        description="Exit status of the launcher, negative for a signal; None if not started."
    )
    stop_signal: str | None = Field(description="Signal that asked the worker to stop, such as SIGTERM.")
    message: str = Field("", description="What went wrong before the launcher started.")


class RankError(Record):
    """The exception that ended a rank."""

    rank: int = Field(description="Global rank.")
    host: str = Field(description="Host name.")
    time: float = Field(description="Unix time of the failure; the earliest error is usually the cause.")
    kind: str = Field(description="Name of the exception's class.")
    message: str = Field(description="Its text.")
    traceback: str = Field(description="The whole traceback.")


@dataclass(frozen=True)
class AttemptDir:
    """Paths in the folder of one attempt."""

    root: Path

    @property
    def settings(self) -> Path:
        """The `Attempt`."""
        return self.root / "attempt.json"

    @property
    def plan(self) -> Path:
        """The plan of this attempt; its choice may be a later rung of the ladder."""
        return self.root / "plan.json"

    @property
    def accelerate(self) -> Path:
        """The Accelerate file of this attempt."""
        return self.root / "accelerate.yaml"

    @property
    def deepspeed(self) -> Path:
        """The DeepSpeed file of this attempt; an empty object where DeepSpeed has no part."""
        return self.root / "deepspeed.json"

    @property
    def training(self) -> Path:
        """The training arguments of this attempt."""
        return self.root / "training.json"

    @property
    def stopped(self) -> Path:
        """Written by rank 0 when the ranks saved and stopped because they were asked to."""
        return self.root / "stopped.json"

    @property
    def rendezvous(self) -> Path:
        """Folder of the published addresses, one file per start of the job (Slurm may requeue it)."""
        return self.root / "rendezvous"

    @property
    def stop_file(self) -> Path:
        """Created by a worker that was told to end: save and stop."""
        return self.root / "STOP"

    @property
    def ranks(self) -> Path:
        """Folder of the ranks' reports."""
        return self.root / "ranks"

    @property
    def errors(self) -> Path:
        """Folder of the ranks' tracebacks."""
        return self.root / "errors"

    @property
    def slurm(self) -> Path:
        """Submitit's folder: batch script, pickles, the step's output."""
        return self.root / "slurm"

    def log(self, node_rank: int) -> Path:
        """Everything the launcher and the ranks of a node print."""
        return self.root / f"node-{node_rank}.log"

    def exit_record(self, node_rank: int) -> Path:
        """The `NodeExit` of a node."""
        return self.root / f"node-{node_rank}.json"

    def read(self) -> Attempt:
        """The settings of the attempt."""
        return Attempt.model_validate(read_json(self.settings, "shardmake train NAME"))

    def exits(self) -> list[NodeExit]:
        """The exit records there are, by node."""
        return [NodeExit.model_validate_json(path.read_text()) for path in sorted(self.root.glob("node-*.json"))]

    def rank_errors(self) -> list[RankError]:
        """The ranks' errors, earliest first."""
        errors = [RankError.model_validate_json(path.read_text()) for path in self.errors.glob("rank-*.json")]
        return sorted(errors, key=lambda error: error.time)


def write_record(path: Path, record: Record) -> None:
    """Write ``record`` atomically."""
    write_json(path, record.model_dump(mode="json"))


def record_error(folder: AttemptDir, rank: int, error: BaseException) -> None:
    """Keep the exception that ends ``rank`` for the driver."""
    text = "".join(traceback.format_exception(error))
    record = RankError(
        rank=rank,
        host=socket.gethostname(),
        time=time.time(),
        kind=type(error).__name__,
        message=str(error),
        traceback=text,
    )
    write_record(folder.errors / f"rank-{rank}.json", record)


def rank_report(folder: AttemptDir, rank: int, report: dict[str, Any]) -> None:
    """Keep what ``rank`` found itself to be: world size, MASTER_ADDR, engine."""
    write_json(folder.ranks / f"rank-{rank}.json", report)
