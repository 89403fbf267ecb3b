"""The history of a run's attempts, read from ``train/attempts/index.json``, and what follows from it."""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from pydantic import Field

from shardmake.core.atomic import sealed, write_json
from shardmake.run.record import RunFile, read_record


class EndReason(Enum):
    """Why an attempt ended."""

    FINISHED = "finished"
    STOP_REQUESTED = "stop requested"
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    TERMINATED = "stopped by SIGTERM"
    CANCELLED = "cancelled by a person"
    GPU_OUT_OF_MEMORY = "GPU out of memory"
    HOST_OUT_OF_MEMORY = "host out of memory"
    GPU_FAULT = "GPU fault"
    NODE_FAILURE = "node failure"
    DISK_FULL = "disk full"
    SETUP = "unsuitable setup"
    PREFLIGHT = "preflight failure"
    DAMAGED_CHECKPOINT = "damaged checkpoint"
    RENDEZVOUS = "rendezvous failed"
    COMMUNICATION = "communication failure"
    HANG = "hang"
    SERVICE_START = "the service did not start"
    SERVICE = "the service ended"
    KILLED = "a process was killed"
    NON_FINITE = "non-finite loss"
    USER_ERROR = "error in the training"
    LOST = "unknown"


BY_PERSON = {EndReason.STOP_REQUESTED.value, EndReason.CANCELLED.value}
"""Ends that a person asked for. They are not failures: nothing has to be fixed, and the same command resumes."""
_NOTHING_TRAINED = {EndReason.PREFLIGHT.value, EndReason.DAMAGED_CHECKPOINT.value}


class AttemptRecord(RunFile):
    """One attempt that has ended."""

    attempt: int = Field(description="Its number.")
    job: str = Field(description="The job it ran as.")
    plan: str = Field(description="Digest of the plan that the fallback belongs to.")
    strategy: str = Field(description="How states were sharded.")
    fallback: int = Field(description="Number of the plan's fallback; 0 is the plan's choice.")
    submitted: float = Field(description="Unix time.")
    ended: float = Field(description="Unix time at which the driver saw the end.")
    end: str = Field(description="Why it ended (`shardmake.run.attempt_history.EndReason`).")
    message: str = Field(description="The same as text.")
    host: str | None = Field(description="The node to blame, if there is one.")
    checkpoint_step: int = Field(
        description="Step of the newest checkpoint afterwards; for a script, Unix time of the newest file it left."
    )
    failed_step: int | None = Field(None, description="Step whose loss or gradient norm was not finite.")
    next_fallback: int | None = Field(None, description="Fallback that the next attempt takes; None until decided.")
    excluded: str | None = Field(None, description="Node that later attempts avoid.")
    all_memory: bool = Field(False, description="Later attempts with this plan request all of a node's memory.")


def load_history(path: Path) -> list[AttemptRecord]:
    """Return the attempts that have ended."""
    return read_record(path, list[AttemptRecord], AttemptRecord.made_by) if path.exists() else []


def save_history(path: Path, history: Sequence[AttemptRecord]) -> None:
    """Write the attempts that have ended."""
    write_json(path, [sealed(record.as_json()) for record in history])


def next_fallback(history: Sequence[AttemptRecord], plan: str) -> int:
    """Return the fallback of ``plan`` (a digest) for the next attempt; a record without a decision repeats its own."""
    if not history or history[-1].plan != plan:
        return 0
    last = history[-1]
    return last.fallback if last.next_fallback is None else last.next_fallback


def wants_all_memory(history: Sequence[AttemptRecord], plan: str) -> bool:
    """Return whether an attempt with ``plan`` (a digest) needs more host RAM than its job requested."""
    return any(record.all_memory for record in history if record.plan == plan)


def _begin(history: Sequence[AttemptRecord]) -> int:
    """Return where the current driver's attempts begin: after the last record that no attempt was to follow."""
    return max((number for number, record in enumerate(history, 1) if record.next_fallback is None), default=0)


def idle_attempts(history: Sequence[AttemptRecord]) -> int:
    """Count this driver's latest attempts that trained and did not advance the newest checkpoint."""
    begin = _begin(history[:-1])
    before = history[begin - 1].checkpoint_step if begin else 0
    steps = [before, *(record.checkpoint_step for record in history[begin:] if record.end not in _NOTHING_TRAINED)]
    idle = 0
    while idle < len(steps) - 1 and steps[-1 - idle] <= steps[-2 - idle]:
        idle += 1
    return idle


def failing_nodes(history: Sequence[AttemptRecord]) -> int:
    """Count this driver's latest attempts that failed the preflight."""
    drive = history[_begin(history[:-1]) :]
    trained = (record.end != EndReason.PREFLIGHT.value for record in reversed(drive))
    return next((failed for failed, has_trained in enumerate(trained) if has_trained), len(drive))


def failed_alike(history: Sequence[AttemptRecord]) -> bool:
    """Return whether the node that the last record blames ended an earlier attempt for the same reason."""
    *earlier, last = history
    return last.host is not None and any((record.host, record.end) == (last.host, last.end) for record in earlier)


def may_rewind(history: Sequence[AttemptRecord]) -> bool:
    """Return whether the last record's step failed for the first time; a second failure would repeat forever."""
    *earlier, last = history
    return last.failed_step is not None and last.failed_step not in {record.failed_step for record in earlier}


def suspected_nodes(history: Sequence[AttemptRecord]) -> list[str]:
    """Return those of `excluded_nodes` that passed their preflight, and may have failed by chance, in their order."""
    drive = history[_begin(history) :]
    proven = {record.excluded for record in drive if record.end == EndReason.PREFLIGHT.value}
    return [node for node in excluded_nodes(history) if node not in proven]


def excluded_nodes(history: Sequence[AttemptRecord]) -> list[str]:
    """Return the nodes that failed under this driver; a later driver may use them again."""
    return list(dict.fromkeys(record.excluded for record in history[_begin(history) :] if record.excluded))
