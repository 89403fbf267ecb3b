"""A user's trainings take turns: Slurm's queue holds at most so many of them at once, over all runs and checkouts.

The drivers of a user on one machine pass a lock in the user's runtime folder: one looks at the queue and submits before
the next one looks. Another login node has a lock of its own, so drivers on two of them that look within the same second
may submit one training too many.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from shardmake.launch.low_memory_wait import PREFIX, SECONDS, other_trainings, read_queue
from shardmake.launch.squeue_cache import file_lock, runtime_folder, slurm_in_use

WaitUntilSlot = Callable[[list[str] | None], NoReturn]


def snapshot_file() -> Path:
    """Where waiting drivers share their looks at the queue."""
    return runtime_folder() / f"waiting-{slurm_in_use()}"


def require_slot(name: str, limit: int, wait: WaitUntilSlot, seconds: float = SECONDS) -> None:
    """Call ``wait`` unless fewer than ``limit`` trainings of the user beside ``name`` were queued ``seconds`` ago.

    ``wait`` gets their names, or None where Slurm does not answer, and does not come back.
    """
    queue = read_queue(str(snapshot_file()), seconds)
    ahead = None if queue is None else other_trainings(queue, name)
    if ahead is None or len(ahead) >= limit:
        wait(ahead)


@contextlib.contextmanager
def submission_slot(name: str, limit: int, wait: WaitUntilSlot) -> Iterator[None]:
    """Hold the turn to submit the job ``name``, if there is room now; hold it no longer than that takes."""
    with file_lock(snapshot_file().with_suffix(".turn")):
        require_slot(name, limit, wait, 0)
        yield


def waiting_message(ahead: list[str] | None, run: str, limit: int) -> str:
    """For people: why ``run`` waits, and for whom; ``ahead`` are names of jobs."""
    if ahead is None:
        return f"Slurm does not answer; {run} is submitted once it does."
    runs = ", ".join(sorted(name.removeprefix(PREFIX).rpartition("-")[0] for name in ahead))
    return (
        f"You have {len(ahead)} training(s) in the queue ({runs}), and trainings_per_user in the cluster file is "
        f"{limit}: {run} waits for one of them to end."
    )
