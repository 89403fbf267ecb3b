"""The story of a run's attempts, as ``train/attempts/index.json`` tells it, and what follows from it."""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from pydantic import Field, TypeAdapter

from shardmake.core.atomic import write_json
from shardmake.run.attempt import Record


class End(Enum):
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


class Chapter(Record):
    """One attempt that has ended."""

    attempt: int = Field(description="Its number.")
    job: str = Field(description="The job it ran as.")
    plan: str = Field(description="Digest of the plan whose ladder the rungs belong to.")
    strategy: str = Field(description="How states were sharded.")
    rung: int = Field(description="Rung of the plan's ladder; 0 is the plan's choice.")
    submitted: float = Field(description="Unix time.")
    ended: float = Field(description="Unix time at which the driver saw the end.")
    end: str = Field(description="Why it ended (`shardmake.run.attempt_history.End`).")
    sentence: str = Field(description="The same for people.")
    host: str | None = Field(description="The node to blame, where there is one.")
    checkpoint_step: int = Field(
        description="Step of the newest checkpoint afterwards; for a script, Unix time of the newest file it left."
    )
    failed_step: int | None = Field(None, description="Step whose loss or gradient norm was not finite.")
    next_rung: int | None = Field(None, description="Rung for the next attempt, once decided.")
    excluded: str | None = Field(None, description="Node that later attempts avoid.")
    all_memory: bool = Field(False, description="Later attempts with this plan ask for all of a node's memory.")


_CHAPTERS = TypeAdapter(list[Chapter])


def read_story(path: Path) -> list[Chapter]:
    """The chapters so far."""
    return _CHAPTERS.validate_json(path.read_text()) if path.exists() else []


def write_story(path: Path, story: Sequence[Chapter]) -> None:
    """Write the chapters."""
    write_json(path, [chapter.model_dump(mode="json") for chapter in story])


def next_rung(story: Sequence[Chapter], plan: str) -> int:
    """Rung of ``plan`` (a digest) that the next attempt takes; a chapter without a decision repeats its own."""
    if not story or story[-1].plan != plan:
        return 0
    last = story[-1]
    return last.rung if last.next_rung is None else last.next_rung


def wants_all_memory(story: Sequence[Chapter], plan: str) -> bool:
    """Whether an attempt with ``plan`` (a digest) was killed for want of host RAM that its job had not asked for."""
    return any(chapter.all_memory for chapter in story if chapter.plan == plan)


def _begin(story: Sequence[Chapter]) -> int:
    """Where the present drive begins: after the last chapter that nothing was to follow, which a person has read."""
    return max((number for number, chapter in enumerate(story, 1) if chapter.next_rung is None), default=0)


def idle_attempts(story: Sequence[Chapter]) -> int:
    """Attempts of this drive, the last one included, that trained and did not advance the newest checkpoint."""
    begin = _begin(story[:-1])
    before = story[begin - 1].checkpoint_step if begin else 0
    steps = [before, *(chapter.checkpoint_step for chapter in story[begin:] if chapter.end != End.PREFLIGHT.value)]
    idle = 0
    while idle < len(steps) - 1 and steps[-1 - idle] <= steps[-2 - idle]:
        idle += 1
    return idle


def unfit_nodes(story: Sequence[Chapter]) -> int:
    """Attempts of this drive, up to the last one, that failed the preflight."""
    drive = story[_begin(story[:-1]) :]
    trained = (chapter.end != End.PREFLIGHT.value for chapter in reversed(drive))
    return next((unfit for unfit, has_trained in enumerate(trained) if has_trained), len(drive))


def hung_before(story: Sequence[Chapter]) -> bool:
    """Whether the node that the last chapter blames held up an earlier attempt as well."""
    *earlier, last = story
    return last.host is not None and any(
        chapter.host == last.host and chapter.end == End.HANG.value for chapter in earlier
    )


def may_rewind(story: Sequence[Chapter]) -> bool:
    """Whether the last chapter's step failed for the first time: the same numbers again would fail for ever."""
    *earlier, last = story
    return last.failed_step is not None and last.failed_step not in {chapter.failed_step for chapter in earlier}


def excluded_nodes(story: Sequence[Chapter]) -> list[str]:
    """Nodes that failed on their own in this drive, once each; a person who starts another may have mended them."""
    return list(dict.fromkeys(chapter.excluded for chapter in story[_begin(story) :] if chapter.excluded))
