"""The history of a run's attempts, as ``train/attempts/index.json`` tells it, and what follows from it."""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from pydantic import Field

from shardmake.core.atomic import write_json
from shardmake.run.record import RunRecord, read_record


class EndReason(Enum):
    """Why an attempt ended."""

    FINISHED = "finished"
    STOP_REQUESTED = "stop requested"
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled by a person"
    GPU_OUT_OF_MEMORY = "GPU out of memory"
    HOST_OUT_OF_MEMORY = "host out of memory"
    NODE_FAILURE = "node failure"
    PREFLIGHT = "preflight failure"
    RENDEZVOUS = "nodes did not meet"
    COMMUNICATION = "communication failure"
    HANG = "hang"
    KILLED = "a process was killed"
    NON_FINITE = "non-finite loss"
    USER_ERROR = "error in the training"
    LOST = "lost without a trace"


class AttemptRecord(RunRecord):
    """One attempt that has ended."""

    attempt: int = Field(description="Its number.")
    job: str = Field(description="The job it ran as.")
    plan: str = Field(description="Digest of the plan whose fallbacks the fallbacks belong to.")
    strategy: str = Field(description="How states were sharded.")
    fallback: int = Field(description="Fallback of the plan's fallbacks; 0 is the plan's choice.")
    submitted: float = Field(description="Unix time.")
    ended: float = Field(description="Unix time at which the driver saw the end.")
    end: str = Field(description="Why it ended (`shardmake.run.attempt_history.End`).")
    sentence: str = Field(description="The same for people.")
    host: str | None = Field(description="The node to blame, where there is one.")
    checkpoint_step: int = Field(
        description="Step of the newest checkpoint afterwards; for a script, Unix time of the newest file it left."
    )
    failed_step: int | None = Field(None, description="Step whose loss or gradient norm was not finite.")
    next_fallback: int | None = Field(None, description="Fallback for the next attempt, once decided.")
    excluded: str | None = Field(None, description="Node that later attempts avoid.")
    all_memory: bool = Field(False, description="Later attempts with this plan ask for all of a node's memory.")


def load_history(path: Path) -> list[AttemptRecord]:
    """The attempt_records so far."""
    return read_record(path, list[AttemptRecord], AttemptRecord.made_by) if path.exists() else []


def save_history(path: Path, history: Sequence[AttemptRecord]) -> None:
    """Write the attempt_records."""
    write_json(path, [record.as_json() for record in history])


def next_fallback(history: Sequence[AttemptRecord], plan: str) -> int:
    """Return the fallback of ``plan`` (a digest) for the next attempt; a record without a decision repeats its own."""
    if not history or history[-1].plan != plan:
        return 0
    last = history[-1]
    return last.fallback if last.next_fallback is None else last.next_fallback


def wants_all_memory(history: Sequence[AttemptRecord], plan: str) -> bool:
    """Whether an attempt with ``plan`` (a digest) was killed for want of host RAM that its job had not asked for."""
    return any(attempt_record.all_memory for attempt_record in history if attempt_record.plan == plan)


def _begin(history: Sequence[AttemptRecord]) -> int:
    """Return where the present drive begins: after the last record that nothing was to follow."""
    return max(
        (number for number, attempt_record in enumerate(history, 1) if attempt_record.next_fallback is None), default=0
    )


def idle_attempts(history: Sequence[AttemptRecord]) -> int:
    """Attempts of this drive, the last one included, that trained and did not advance the newest checkpoint."""
    begin = _begin(history[:-1])
    before = history[begin - 1].checkpoint_step if begin else 0
    steps = [
        before,
        *(
            attempt_record.checkpoint_step
            for attempt_record in history[begin:]
            if attempt_record.end != EndReason.PREFLIGHT.value
        ),
    ]
    idle = 0
    while idle < len(steps) - 1 and steps[-1 - idle] <= steps[-2 - idle]:
        idle += 1
    return idle


def failing_nodes(history: Sequence[AttemptRecord]) -> int:
    """Attempts of this drive, up to the last one, that failed the preflight."""
    drive = history[_begin(history[:-1]) :]
    trained = (attempt_record.end != EndReason.PREFLIGHT.value for attempt_record in reversed(drive))
    return next((unfit for unfit, has_trained in enumerate(trained) if has_trained), len(drive))


def hung_before(history: Sequence[AttemptRecord]) -> bool:
    """Whether the node that the last attempt_record blames held up an earlier attempt as well."""
    *earlier, last = history
    return last.host is not None and any(
        attempt_record.host == last.host and attempt_record.end == EndReason.HANG.value for attempt_record in earlier
    )


def may_rewind(history: Sequence[AttemptRecord]) -> bool:
    """Whether the last attempt_record's step failed for the first time: the same numbers again would fail for ever."""
    *earlier, last = history
    return last.failed_step is not None and last.failed_step not in {
        attempt_record.failed_step for attempt_record in earlier
    }


def excluded_nodes(history: Sequence[AttemptRecord]) -> list[str]:
    """Nodes that failed on their own in this drive, once each; a person who starts another may have mended them."""
    return list(
        dict.fromkeys(
            attempt_record.excluded for attempt_record in history[_begin(history) :] if attempt_record.excluded
        )
    )
