"""A driver that waits for Slurm, in as little memory as Python needs, and one squeue query for all drivers of a user.

A hundred waiting runs have a hundred drivers, and each would hold 35 MiB without using it. A driver waits while its
job is pending, or while its user has enough trainings in the queue. It then replaces itself by this file, in an
interpreter that loads next to nothing and no other file of the package. When the wait is over, the driver starts again:
its state is on disk. The run's lock stays held, because its file stays open.

All drivers of a user on this machine share one query: the first one whose snapshot is too old runs squeue for all of
the user's jobs, and leaves the answer for the others. The slower Slurm answers, the longer an answer counts: together
the drivers keep the controller busy for at most a twentieth of the time. But none waits longer than a minute: a query
that was slow because the controller restarted must not hide what happened then.

A snapshot is squeue's rows and a last line: ``answered SECONDS``, or ``failed SECONDS``.
"""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs more memory than all the rest
    from typing import NoReturn

SECONDS = 20.0
COMMAND = ("squeue", "--noheader", "--me", "--all", "--format=%i|%T|%R|%j")
FRESH_SECONDS = 2.0
FAILED_SECONDS = 10.0
LONGEST_SECONDS = 60.0
BUSY = 20
_QUERY_SECONDS = 60
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
    "Minutes",  # the account's budget is used up
    "UsageThreshold",
    "ReservationDeleted",
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
    while still_waits(job, cached_squeue(snapshot, SECONDS)) or still_waits(job, cached_squeue(snapshot, 0)):
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
    file = open_snapshot(snapshot)
    try:
        queue = read_queue(file, SECONDS)
        has_slot = queue is not None and len(other_trainings(queue, name)) < limit
        if has_slot:
            add_row(file, f"0|CLAIMED||{name}")
    finally:
        os.close(file)
    return has_slot


def cached_squeue(snapshot: str, max_age: float = FRESH_SECONDS) -> str | None:
    """Return the user's queue, one ``ID|STATE|NODES or (REASON)|NAME`` a line; None if Slurm does not answer.

    An answer counts for ``max_age`` seconds, and longer if Slurm is slow. With a ``max_age`` of 0 squeue always runs.
    """
    file = open_snapshot(snapshot)
    try:
        return read_queue(file, max_age)
    finally:
        os.close(file)


def open_snapshot(snapshot: str) -> int:
    """Open and lock the file of a snapshot; closing it releases the lock."""
    import fcntl

    file = os.open(snapshot, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def read_queue(file: int, max_age: float) -> str | None:
    """Return the queue in a locked snapshot, after a new query if the snapshot is too old."""
    rows, answered, seconds = _load(file)
    if is_fresh(time.time() - os.fstat(file).st_mtime, max_age, seconds, answered):
        return rows if answered else None
    return _query(file)


def add_row(file: int, row: str) -> None:
    """Add a row to the queue in a locked snapshot, which makes the snapshot count from now."""
    rows, answered, seconds = _load(file)
    _save(file, f"{rows}{row}\n", answered, seconds or 0)


def is_fresh(age: float, max_age: float, query_seconds: float | None, answered: bool) -> bool:
    """Return whether a snapshot of ``age`` seconds still counts; ``query_seconds`` is None if there is none.

    A failure counts as well, so that a controller in trouble is not flooded with queries.
    """
    if query_seconds is None or max_age == 0:
        return False
    pause = min(max(BUSY * query_seconds, 0 if answered else FAILED_SECONDS), LONGEST_SECONDS)
    return 0 <= age < max(max_age, pause)


def _load(file: int) -> tuple[str, bool, float | None]:
    """Return rows, whether Slurm answered, and how long squeue took (None for an empty or incomplete snapshot)."""
    rows, _, last = os.pread(file, 1 << 26, 0).decode(errors="replace").removesuffix("\n").rpartition("\n")
    word, _, seconds = last.partition(" ")
    return (rows, word == "answered", float(seconds)) if word in ("answered", "failed") else ("", False, None)


def _save(file: int, rows: str, answered: bool, seconds: float) -> None:
    """Replace the snapshot. On a full disk it stays incomplete, and the next driver runs squeue as well."""
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, f"{rows}\n{'answered' if answered else 'failed'} {seconds:.3f}\n".encode(), 0)
    except OSError:
        pass


def _query(file: int) -> str | None:
    """Run squeue and save its answer."""
    started = time.time()
    reader, writer = os.pipe()
    command = ["timeout", str(_QUERY_SECONDS), *COMMAND]
    actions = [(os.POSIX_SPAWN_DUP2, writer, 1), (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    pid = os.posix_spawnp(command[0], command, os.environ, file_actions=actions)
    os.close(writer)
    printed = b""
    while chunk := os.read(reader, 1 << 16):
        printed += chunk
    os.close(reader)
    answered = os.waitpid(pid, 0)[1] == 0
    rows = printed.decode(errors="replace")
    _save(file, rows, answered, time.time() - started)
    return rows if answered else None


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
