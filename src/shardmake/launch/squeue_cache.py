"""One squeue query for all drivers of a user on this machine.

Two hundred runs have two hundred drivers. The first driver whose snapshot is too old runs squeue for all of the user's
jobs, and leaves the answer for the others. The slower Slurm answers, the longer an answer counts: all drivers together
keep the controller busy for at most a twentieth of the time, but none waits longer than a minute: a query that was slow
because the controller restarted must not hide what happened then.

A snapshot is squeue's rows and a last line: ``answered SECONDS``, or ``failed SECONDS``. This module imports next to
nothing, because `low_memory_wait` uses it.
"""

import os
import time

COMMAND = ("squeue", "--noheader", "--me", "--all", "--format=%i|%T|%R|%j")
FRESH_SECONDS = 2.0
FAILED_SECONDS = 10.0
LONGEST_SECONDS = 60.0
BUSY = 20
_QUERY_SECONDS = 60


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
