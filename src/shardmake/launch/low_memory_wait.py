"""A driver that waits for Slurm, in as little memory as Python needs.

A hundred waiting runs have a hundred drivers, and each would hold 35 MiB without using it. A driver waits while its
job is pending, or while its user has enough trainings in the queue. It then replaces itself by this file, in an
interpreter that loads next to nothing. When the wait is over, the driver starts again: its state is on disk. The run's
lock stays held, because its file stays open. Waiting drivers share one squeue query every `SECONDS`.
"""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs more memory than all the rest
    from typing import NoReturn

if __name__ == "__main__":  # started by path, without the package
    sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120
    import squeue_cache  # type: ignore[import-not-found]  # pragma: no cover
else:
    from shardmake.launch import squeue_cache

SECONDS = 20.0
_INTERRUPTED = 130
"""Exit status after Ctrl-C, as that of every command."""
LOCK_VARIABLE = "SHARDMAKE_DRIVER_LOCK"
WAITED_VARIABLE = "SHARDMAKE_DRIVER_WAITED"
STARTED_VARIABLE = "SHARDMAKE_STARTED_JOB"
"""Names the job that a driver waited for, which is not one of an earlier driver."""
HELD_VARIABLE = "SHARDMAKE_HELD_JOB"
"""Names a job that the driver has reported as one that waits for a person."""
_NEEDS_PERSON = (
    "held",
    "Held",
    "NeverSatisfied",
    "BadConstraints",
    "Invalid",
    "NotAllowed",
    "PartitionTimeLimit",
    "PerJob",
)
"""Parts of squeue's reasons for which Slurm keeps a job pending until a person acts."""
PREFIX = "shardmake-"
"""Start of the names of all training jobs."""


def wait_until_started(job: str, lock: int, snapshot: str) -> "NoReturn":
    """Wait in low memory while ``job`` is pending; the open file ``lock`` stays locked."""
    _replace_process("start", job, snapshot, lock=lock)


def wait_until_slot(name: str, limit: int, stop_file: str, lock: int, snapshot: str) -> "NoReturn":
    """Wait in low memory until a slot for the job ``name`` is free, or somebody creates ``stop_file``.

    A slot is free when fewer than ``limit`` other trainings of the user are queued. The driver then starts again with
    `WAITED_VARIABLE` set.
    """
    _replace_process("slot", name, str(limit), stop_file, snapshot, lock=lock)


def _replace_process(*words: str, lock: int) -> "NoReturn":
    os.set_inheritable(lock, True)
    os.environ[LOCK_VARIABLE] = str(lock)
    sys.stdout.flush()
    start_again = [sys.executable, *sys.orig_argv[1:]]
    os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, str(len(words)), *words, *start_again])


def await_start(job: str, snapshot: str) -> None:
    """Wait until ``job`` is no longer pending, or waits for a person, which the driver has not reported yet.

    A shared snapshot may be older than the job, so a new query has to confirm it.
    """
    while still_waits(job, squeue_cache.cached_squeue(snapshot, SECONDS)) or still_waits(
        job, squeue_cache.cached_squeue(snapshot, 0)
    ):
        time.sleep(SECONDS)
    os.environ[STARTED_VARIABLE] = job


def await_slot(name: str, limit: str, stop_file: str, snapshot: str) -> None:
    """Wait until a slot in the queue is free, or the stop file exists."""
    while not (os.access(stop_file, os.F_OK) or claim_slot(name, int(limit), snapshot)):
        time.sleep(SECONDS)
    os.environ[WAITED_VARIABLE] = "1"


def still_waits(job: str, queue: str | None) -> bool:
    """Return whether ``job`` is pending in ``queue`` and needs no report; without an answer (None) it is assumed so."""
    _, pending, after = f"\n{queue}".partition(f"\n{job}|PENDING|")
    return queue is None or (bool(pending) and not is_newly_held(job, after.partition("|")[0]))


def is_newly_held(job: str, reason: str) -> bool:
    """Return whether the pending ``job`` waits for a person by squeue's ``reason``, which was not reported yet."""
    if not needs_person(reason):
        os.environ.pop(HELD_VARIABLE, None)  # if it is held once more, that is reported again
        return False
    return os.environ.get(HELD_VARIABLE) != job


def needs_person(reason: str) -> bool:
    """Return whether Slurm keeps a job pending for ``reason``, as squeue prints it, until a person acts."""
    return any(part in reason for part in _NEEDS_PERSON)


def other_trainings(queue: str, name: str) -> list[str]:
    """Return the names of the trainings in ``queue``, except ``name``."""
    names = [line.split("|", 3)[3] for line in queue.splitlines() if line.count("|") >= 3]
    return [found for found in names if found.startswith(PREFIX) and found != name]


def claim_slot(name: str, limit: int, snapshot: str) -> bool:
    """Return whether ``name`` has a slot, and claim it in the snapshot: of many waiting drivers one continues."""
    file = squeue_cache.open_snapshot(snapshot)
    try:
        queue = squeue_cache.read_queue(file, SECONDS)
        has_slot = queue is not None and len(other_trainings(queue, name)) < limit
        if has_slot:
            squeue_cache.add_row(file, f"0|CLAIMED||{name}")
    finally:
        os.close(file)
    return has_slot


def main(count: str, *words: str) -> None:
    """Wait as the first ``count`` words say, then run the command in the rest of them: the driver again."""
    (what, *details), start_again = words[: int(count)], words[int(count) :]
    try:
        if what == "start":
            await_start(*details)
        else:
            await_slot(*details)
    except KeyboardInterrupt:
        state = f"job {details[0]} stays in the queue" if what == "start" else "no job was submitted"
        print(f"The driver exits, {state}. To continue, run the same command again.", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    os.execv(start_again[0], start_again)


if __name__ == "__main__":
    main(*sys.argv[1:])
