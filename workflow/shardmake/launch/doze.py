"""A driver whose job waits in the queue, in as little memory as Python can do with.

A hundred queued runs have a hundred drivers, which would hold 35 MiB each for doing nothing. So a driver with a pending
job replaces itself by this file, run by an interpreter that loads next to nothing, and is started again, from scratch,
as soon as the job is no longer pending; everything that it knows is on disk anyhow. The run's lock stays held, for its
file stays open. Dozing drivers share one look at the queue, taken every `SECONDS` by whichever is first.
"""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs more memory than all the rest
    from typing import NoReturn

SECONDS = 20.0
LOCK_VARIABLE = "SHARDMAKE_DRIVER_LOCK"


def doze(job: str, lock: int, snapshot: str) -> "NoReturn":
    """Become a dozing driver of the pending ``job`` that holds the open file ``lock``; looks lie in ``snapshot``."""
    os.set_inheritable(lock, True)
    os.environ[LOCK_VARIABLE] = str(lock)
    sys.stdout.flush()
    start_again = [sys.executable, *sys.orig_argv[1:]]
    os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, job, snapshot, *start_again])


def main(job: str, snapshot: str, start_again: list[str]) -> None:
    """Wait until ``job`` is no longer pending, as far as Slurm says, and start the driver again."""
    while is_pending(job, look(snapshot)):
        time.sleep(SECONDS)
    os.execv(start_again[0], start_again)


def is_pending(job: str, queue: str | None) -> bool:
    """Whether the queue, one ``ID|STATE`` a line, has the job pending; no answer (None) changes nothing."""
    return queue is None or f"\n{job}|PENDING\n" in f"\n{queue}"


def look(snapshot: str) -> str | None:
    """The user's queue as it was at most `SECONDS` ago; None where Slurm does not answer."""
    import fcntl

    file = os.open(snapshot, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = os.fstat(file)
        if not found.st_size or time.time() - found.st_mtime > SECONDS:
            _ask(file)
        content = os.pread(file, 1 << 26, 0).decode()
    finally:
        os.close(file)
    return content.removesuffix("\nanswered\n") + "\n" if content.endswith("\nanswered\n") else None


def _ask(file: int) -> None:
    """Replace the content of ``file`` by squeue's answer, the last line saying that it is one."""
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    squeue = 'squeue --noheader --me --format="%i|%T" 2>/dev/null && printf "\\nanswered\\n" || echo silent'
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", squeue], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, file, 1)])
    os.waitpid(pid, 0)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], sys.argv[3:])
    except KeyboardInterrupt:
        sys.exit(f"The driver leaves, job {sys.argv[1]} goes on. To watch it again, run the same command.")
