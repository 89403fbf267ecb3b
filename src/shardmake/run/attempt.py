"""One attempt at training: the driver's settings for workers and ranks, and the records that they write.

An attempt's folder holds ``attempt.json`` (written by the driver before the job is submitted), the rendezvous, a log
and an exit record per node, a report per rank, each node's copy of its ranks' heartbeats, the traceback of every rank
that failed, and the stacks of all ranks if they hung.
"""

import math
import os
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from shardmake.core.atomic import digest, write_json
from shardmake.core.environment import scratch_folder
from shardmake.core.run_folder import make_folder, open_file, protect, rename
from shardmake.core.secrets import redact
from shardmake.run.paths import BelowRoot, RunDir
from shardmake.run.record import RunFile, RunRecord


class Attempt(RunFile):
    """The driver's decisions for one submission."""

    number: int = Field(description="1 for the first attempt of the run.")
    run_folder: str = Field(description="Absolute path of the run's folder.")
    nodes: int = Field(description="Nodes of the job that run ranks.")
    service_nodes: int = Field(0, description="Further nodes of the job, which run the service of the script.")
    spare_nodes: int = Field(0, description="Further nodes of the job, on which a later attempt may run ranks.")
    hosts: list[str] = Field([], description="Nodes that run ranks, by rank; if empty, the first ones of the job.")
    on_one_machine: bool = Field(False, description="The job is processes of the driver's machine, without Slurm.")
    processes_per_node: int = Field(description="Ranks per node.")
    cpus_per_node: int = Field(description="Cores of the job per node.")
    accelerator: str = Field(description="`cpu`, or the GPU model.")
    network_interface: str | None = Field(description="Interface for training traffic; None for the default route's.")
    scratch: str = Field(description="Node-local folder for caches.")
    offline: bool = Field(description="Forbid the ranks any request to the hub.")
    environment: dict[str, str] = Field(default_factory=dict, description="The cluster file's variables of the ranks.")
    resume_from: str | None = Field(description="Checkpoint to resume from, absolute; None to start from step 0.")
    start: int = Field(0, description="How often the ranks had been started before these settings were written.")
    again: int = Field(0, description="How often the job itself started its ranks again, from another checkpoint.")
    restart_in_place: bool = Field(False, description="Failed ranks are started again in the running job, if possible.")
    finished: bool = Field(False, description="The restarted job has nothing to train: its last step is committed.")
    settings_digest: str = Field(description="Digest of the settings that define the result.")
    result_settings: dict[str, str] = Field(
        default_factory=dict, description="These settings as text, by key and without secrets."
    )
    container: str | None = Field(None, description="Image in which the workers run; None without a container.")
    versions: dict[str, str] = Field(description="Libraries on the login node; every node must have the same.")
    commit: str | None = Field(None, description="Commit of Shardmake's checkout; ends in `-dirty` if it was edited.")
    planned_bandwidth: float | None = Field(
        None, description="Bytes per second that one node should reach to others; None for a single node."
    )
    planned_node_bandwidth: float | None = Field(
        None, description="Bytes per second that a GPU should reach to others of its node; None for one rank per node."
    )
    network_check_seconds: float = Field(300, description="How long the network check waits for all ranks.")
    plan_digest: str = Field("", description="Digest of the plan whose fallbacks the attempt's fallback belongs to.")
    hang_seconds: float = Field(600, description="Silence after which a training step counts as hung.")
    checkpoint_bytes: int = Field(0, description="Estimated size of a checkpoint; 0 if there is no estimate.")
    gpu_memory: int = Field(0, description="Memory of a GPU that the plan counts on, bytes; 0 if unknown.")
    rendezvous_seconds: float = Field(300, description="How long nodes wait for each other.")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.processes_per_node

    @property
    def job_nodes(self) -> int:
        """Nodes of the job that leave an exit record: those of the ranks, then those of the service."""
        return self.nodes + self.service_nodes

    @property
    def devices(self) -> int:
        """GPUs of the job, or CPU ranks for which it takes nodes, those of all its nodes included."""
        return self.processes_per_node * (self.nodes if self.on_one_machine else self.job_nodes + self.spare_nodes)

    @property
    def rundir(self) -> RunDir:
        """The run's folder."""
        return RunDir(Path(self.run_folder))

    @property
    def saves(self) -> Path:
        """Node-local folder of the run's checkpoints on their way to the shared one; nothing in it outlives a job."""
        name = f"{self.rundir.name}-{digest(self.run_folder)[:8]}"
        return self.private / "saves" / name

    @property
    def private(self) -> Path:
        """Node-local folder that must belong to this user alone (`make_private`)."""
        return scratch_folder(self.scratch) / f"shardmake-{os.getuid()}"


class SubmittedJob(RunFile):
    """``train/job.json``: the job that owns a run."""

    id: str = Field(description="The job's id, as the executor names it.")
    attempt: int = Field(description="Number of its attempt.")
    submitted: float = Field(description="Unix time.")


class NodeExit(RunFile):
    """The last thing a worker writes: how its node's ranks ended."""

    node_rank: int = Field(description="Rank of the node in the job.")
    host: str = Field(description="Host name.")
    started: float = Field(description="Unix time at which the worker started.")
    ended: float = Field(description="Unix time at which it ended.")
    phase: str = Field(
        description="The phase at the end: `rendezvous`, `preflight` (the node failed it), `run preflight` "
        "(the run did), `checkpoint` (its validation), `training`, or for a run with a service `service start` and "
        "`service`; `lost` if Slurm removed the node from the job, as the driver records."
    )
    returncode: int | None = Field(
        description="Exit status of the launcher, negative for a signal; None if not started."
    )
    stop_signal: str | None = Field(description="Signal that asked the worker to stop, such as SIGTERM.")
    later_signal: str | None = Field(None, description="The same, while the worker waited for the driver.")
    message: str = Field("", description="What went wrong before the launcher started.")
    damaged: list[str] = Field(
        default_factory=list, description="Files of the resumed checkpoint that the node found damaged."
    )
    culprit: str | None = Field(None, description="Name of the node that caused it; None if unknown.")
    oom_kills: int | None = Field(
        None, description="Processes of this job that the kernel killed here because memory ran out; None if unknown."
    )


class RankError(RunFile):
    """The exception that ended a rank."""

    rank: int = Field(description="Global rank.")
    host: str = Field(description="Host name.")
    culprit: str | None = Field(None, description="Name of the node that caused it; None if unknown.")
    time: float = Field(description="Unix time of the failure, by the node's clock.")
    seconds: float = Field(0.0, description="Time since the ranks had met in the network check; 0 before that.")
    kind: str = Field(description="Name of the exception's class.")
    message: str = Field(description="Its text.")
    traceback: str = Field(description="The whole traceback.")
    step: int | None = Field(None, description="Step that failed, if the error names it.")


LOST = "lost"
"""Phase of a node that Slurm removed from the job."""
_met: float | None = None
"""Monotonic time at which the ranks had met, in the process of a rank."""
START_VARIABLE = "SHARDMAKE_START"
"""Counts for a Slurm task and the processes of its worker how often the ranks were started before."""
HEARTBEATS_VARIABLE = "SHARDMAKE_HEARTBEATS"
"""Names the folder on the node to which its ranks write their heartbeats."""
USER_SCRIPT_PHASE = "script"
"""Phase of a rank that runs a user's script, which writes no further heartbeats."""


class Heartbeat(RunFile):
    """A rank's heartbeat: the last sign of progress."""

    rank: int = Field(description="Global rank.")
    host: str = Field(description="Host name.")
    pid: int = Field(description="Process id on that host.")
    phase: str = Field(
        description="`start`, `load`, `first step`, `train`, `save`, `evaluate`, `script`, `end`, `failed`."
    )
    step: int = Field(description="Optimizer steps done.")
    time: float = Field(description="Unix time of the progress.")
    median_step_seconds: float = Field(0.0, description="Median seconds of the last steps; 0 while unknown.")
    compute_seconds: list[float] = Field(
        [], description="Mean seconds per step in some linear layers, in each of the last five windows of ten steps."
    )


class GpuUse(RunRecord):
    """How much a GPU was used since the ranks of its node started, by samples of nvidia-smi."""

    number: str = Field(description="Index on the node.")
    percent: float = Field(description="Mean percent of the time in which a kernel ran.")
    watts: float | None = Field(description="Mean power; None if the driver does not report it.")


class NodeHeartbeats(RunFile):
    """The last heartbeats of one node's ranks, which its worker copies to the shared file system now and then."""

    beats: list[Heartbeat] = Field(description="By rank; ranks without a heartbeat are missing.")
    gpus: list[GpuUse] = Field(default_factory=list, description="Use of the node's GPUs; empty before a sample.")


class RequestedStop(RunFile):
    """``stopped.json``: the ranks saved and stopped because they were asked to; a user's script may leave it empty."""

    step: int = Field(description="Step of the newest checkpoint.")
    time: float = Field(description="Unix time.")


class RankState(RunFile):
    """One rank at a hang."""

    rank: int = Field(description="Global rank.")
    host: str = Field(description="Host name; empty if unknown.")
    step: int = Field(description="Optimizer steps done.")
    process: str = Field("", description="psutil's name of its process's state; `gone` without one, empty if unknown.")
    answered: bool = Field(False, description="It wrote its stacks.")
    in_collective: bool = Field(False, description="Its stacks show a collective.")
    builds: bool = Field(False, description="Its stacks show that it waits for the build of a kernel.")


class NodeStates(RunFile):
    """The ranks of one node when the ranks hung."""

    ranks: list[RankState] = Field(description="By rank.")
    build_locks: list[str] = Field(
        default_factory=list, description="Locks of kernel builds that ranks of this node wait for."
    )


class Hang(RunFile):
    """The workers' finding after all ranks stopped making progress."""

    rank: int | None = Field(description="The rank that held up the others; None if none stands out.")
    host: str | None = Field(description="Its host.")
    message: str = Field(description="The same as text, with phase, step and seconds without a heartbeat.")


@dataclass(frozen=True)
class AttemptDir:
    """Paths in the folder of one attempt."""

    root: Path

    def __post_init__(self) -> None:
        if self.root.parent.name == "attempts":
            protect(self.root.absolute().parents[2])

    settings = BelowRoot("attempt.json", "The `Attempt`.")
    plan = BelowRoot("plan.json", "The plan of this attempt; its choice may be one of the fallbacks.")
    accelerate = BelowRoot("accelerate.yaml", "The Accelerate file of this attempt.")
    deepspeed = BelowRoot(
        "deepspeed.json", "The DeepSpeed file of this attempt; an empty object if DeepSpeed is not used."
    )
    deepspeed_native = BelowRoot(
        "deepspeed-native.json", 'The DeepSpeed file with numbers instead of "auto", for a script that reads it itself.'
    )
    training = BelowRoot("training.json", "The training arguments of this attempt.")
    stopped = BelowRoot(
        "stopped.json", "Written by rank 0 when the ranks saved and stopped because they were asked to."
    )
    learning = BelowRoot("learning.json", "What the attempt learned with (`shardmake.run.engine.LearningSettings`).")
    trained = BelowRoot("trained.json", "The engine that a user's script trained with (`shardmake.run.engine.Engine`).")
    rendezvous = BelowRoot(
        "rendezvous", "Folder of the published addresses, one file per start of the job (Slurm may restart it)."
    )
    owner = BelowRoot(
        "owner", "Folder of one empty file, named after the Slurm job that the attempt belongs to (`attempt_owner`)."
    )
    next = BelowRoot(
        "next", "Folder of one empty file: the attempt that follows in the same job, or `none` (restart in place)."
    )
    services = BelowRoot("services", "Folder of the services' addresses, one file per start of the job and node.")
    stop_file = BelowRoot("STOP", "Created by a worker that received a signal: the ranks save and stop.")
    ranks = BelowRoot("ranks", "Folder of the ranks' reports.")
    errors = BelowRoot("errors", "Folder of the ranks' tracebacks.")
    hung = BelowRoot(
        "HUNG", "Created by the first worker that misses a heartbeat: all workers collect stacks and end their ranks."
    )
    hang = BelowRoot("hang.json", "The `Hang`, written by that worker.")
    heartbeats = BelowRoot("heartbeat", "Folder of the nodes' copies of their ranks' heartbeats.")
    stacks = BelowRoot("stacks", "Folder of the ranks' stacks at a hang.")
    slurm = BelowRoot("slurm", "Submitit's folder: batch script, pickles, the step's output.")

    def log(self, node_rank: int) -> Path:
        """Everything the launcher and the ranks of a node print."""
        return self.root / f"node-{node_rank}.log"

    def stack(self, rank: int) -> Path:
        """Stacks of a rank from `faulthandler`; empty unless they were requested."""
        return self.stacks / f"rank-{rank}.txt"

    def nccl_log(self, rank: int) -> Path:
        """NCCL's messages of a rank, kept if the network check failed."""
        return self.stacks / f"nccl-debug-rank-{rank}.txt"

    def node_heartbeats(self, node_rank: int) -> Path:
        """The `NodeHeartbeats` of a node."""
        return self.heartbeats / f"node-{node_rank}.json"

    def node_beats(self, node_rank: int) -> list[Heartbeat]:
        """Return the last heartbeats that a node's worker copied; up to half a minute old, see the watchdog."""
        found = NodeHeartbeats.read_if_exists(self.node_heartbeats(node_rank))
        return found.beats if found else []

    def beat(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of a rank of any node, as `node_beats`; None before its first."""
        if not self.settings.exists():
            return None
        beats = self.node_beats(rank // self.read().processes_per_node)
        return next((beat for beat in beats if beat.rank == rank), None)

    def is_superseded(self) -> bool:
        """Return whether a later attempt, or a restart of the job, has begun, after which this one must not write."""
        later = (int(path.name) > int(self.root.name) for path in self.root.parent.iterdir() if path.name.isdigit())
        starts = (int(path.stem.removeprefix("start-")) for path in self.rendezvous.glob("start-*.json"))
        return any(later) or any(start > restarts() for start in starts)

    def exit_record(self, node_rank: int) -> Path:
        """The `NodeExit` of a node."""
        return self.root / f"node-{node_rank}.json"

    def read(self) -> Attempt:
        """Return the settings of the attempt."""
        return Attempt.read(self.settings)

    def exits(self) -> list[NodeExit]:
        """Return the exit records so far, by node."""
        found = (NodeExit.read_if_exists(path) for path in sorted(self.root.glob("node-*.json")))
        return [record for record in found if record is not None]

    def count_exits(self) -> int:
        """Return the number of exit records so far, from one listing of the folder."""
        return sum(1 for _ in self.root.glob("node-*.json"))

    def has_failed_node(self) -> bool:
        """Return whether the ranks of a node failed; reads no further exit record than the first of those."""
        found = (NodeExit.read_if_exists(path) for path in self.root.glob("node-*.json"))
        return any(record is not None and record.returncode != 0 for record in found)

    def read_hang(self) -> Hang | None:
        """Return the workers' finding about a hang, or None if there was no hang."""
        if found := Hang.read_if_exists(self.hang):
            return found
        if self.hung.exists():
            return Hang(
                rank=None,
                host=None,
                message="The ranks made no progress, and the job ended before it wrote their stacks.",
            )
        return None

    def rank_errors(self) -> list[RankError]:
        """Return the ranks' errors; the earliest, which is usually the cause, comes first.

        All ranks leave the network check together. The time since then is measured by one clock each, so clocks of
        nodes may differ. Errors of one time, and those before the check, are ordered by the nodes' clocks.
        """
        errors = [RankError.read(path) for path in self.errors.glob("rank-*.json")]
        return sorted(errors, key=lambda error: (error.seconds, error.time))


def restarts() -> int:
    """Return how often Slurm has restarted the job of this process; in a task of it the job's own starts count, too."""
    return int(os.environ.get(START_VARIABLE) or os.environ.get("SLURM_RESTART_COUNT", "0"))


def host_name() -> str:
    """Return this node's Slurm name, by which it can be excluded, or else its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def mark_meeting() -> None:
    """Note that all ranks have met in the network check at this moment."""
    global _met
    _met = time.monotonic()


def record_error(folder: AttemptDir, rank: int, error: BaseException) -> None:
    """Write the exception that ends ``rank``, without secrets, for the driver."""
    text, host = redact("".join(traceback.format_exception(error))), host_name()
    record = RankError(
        rank=rank,
        host=host,
        culprit=getattr(error, "host", host),
        time=time.time(),
        seconds=0.0 if _met is None else time.monotonic() - _met,
        kind=type(error).__name__,
        message=redact(str(error)),
        traceback=text,
        step=getattr(error, "step", None),
    )
    if folder.root.is_dir():  # somebody may have moved the checkout
        record.write(folder.errors / f"rank-{rank}.json")


def heartbeat_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's `Heartbeat` in the ``folder`` of its node."""
    return folder / f"rank-{rank}.json"


def local_heartbeats(folder: AttemptDir) -> Path:
    """Return the node-local folder that the worker names to its ranks; without a worker, one in the attempt."""
    return Path(os.environ.get(HEARTBEATS_VARIABLE, folder.heartbeats))


def write_heartbeat(
    folder: AttemptDir, rank: int, phase: str, step: int, median_step_seconds: float = 0.0,
    compute_seconds: Sequence[float] = (),
) -> None:  # fmt: skip
    """Replace the heartbeat of ``rank`` atomically, without fsync: only the worker of this node reads it."""
    beat = Heartbeat(
        rank=rank, host=host_name(), pid=os.getpid(), phase=phase, step=step, time=time.time(),
        median_step_seconds=median_step_seconds, compute_seconds=[*compute_seconds],
    )  # fmt: skip
    replace_unsynced(heartbeat_file(local_heartbeats(folder), rank), beat)


def replace_unsynced(path: Path, record: RunRecord) -> None:
    """Replace a file that is written every few seconds, atomically but without fsync.

    Only its folder is made: after somebody moved the checkout, nothing appears under the old path.
    """
    make_folder(path.parent, parents=False)
    temporary = path.with_name(f".{path.stem}.tmp")
    with open_file(temporary, "w") as file:
        file.write(record.model_dump_json())
    rename(temporary, path)


def rank_report(folder: AttemptDir, rank: int, report: dict[str, Any]) -> None:
    """Write the facts that ``rank`` found: world size, MASTER_ADDR, engine."""
    write_json(folder.ranks / f"rank-{rank}.json", report)


PATIENCE = 6
"""Loading, the first step, saves and evaluations may take this many times longer than a step."""

_ROOM_SECONDS = 300.0


def room_timeout(hang_seconds: float) -> float:
    """Return how long a save that must not be lost waits for room, well within the watchdog's time for a save."""
    return min(_ROOM_SECONDS, PATIENCE * hang_seconds / 2)


def collective_timeout(hang_seconds: float) -> int:
    """Return torch's timeout of a collective in seconds: after the watchdog's, which collects stacks first."""
    return max(1800, math.ceil(2 * PATIENCE * hang_seconds))
