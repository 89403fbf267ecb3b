"""A limit on how many trainings a user has in Slurm's queue, over all runs and checkouts.

The drivers of a user on one machine take turns under a lock: one queries the queue and submits before the next one
does. Each login node has its own lock. So drivers on two login nodes may exceed the limit by one training if they query
within the same second.
"""

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from typing import NoReturn

from shardmake.launch.low_memory_wait import PREFIX, SECONDS, other_trainings
from shardmake.launch.slurm_commands import waiting_snapshot
from shardmake.launch.squeue_cache import cached_squeue

WaitUntilSlot = Callable[[list[str] | None], NoReturn]


def require_slot(name: str, limit: int, wait: WaitUntilSlot, max_age: float = SECONDS) -> None:
    """Call ``wait`` unless the user has fewer than ``limit`` trainings beside ``name`` in the queue.

    ``wait`` gets their names, or None if Slurm does not answer, and does not return.
    """
    queue = cached_squeue(str(waiting_snapshot()), max_age)
    ahead = None if queue is None else other_trainings(queue, name)
    if ahead is None or len(ahead) >= limit:
        wait(ahead)


@contextlib.contextmanager
def submission_slot(name: str, limit: int, wait: WaitUntilSlot) -> Iterator[None]:
    """Hold the lock under which the job ``name`` is submitted; call ``wait`` instead if no slot is free now."""
    with waiting_snapshot().with_suffix(".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        require_slot(name, limit, wait, 0)
        yield


def waiting_message(ahead: list[str] | None, run: str, limit: int) -> str:
    """Return why ``run`` waits; ``ahead`` are the names of the user's other jobs."""
    if ahead is None:
        return f"{run} waits: Slurm does not answer. The driver submits the job once squeue works."
    runs = ", ".join(sorted(name.removeprefix(PREFIX).rpartition("-")[0] for name in ahead))
    return (
        f"{run} waits: you have {len(ahead)} training(s) in the queue ({runs}), and trainings_per_user in the cluster "
        f"file is {limit}. The driver submits the job when one of them has ended."
    )
