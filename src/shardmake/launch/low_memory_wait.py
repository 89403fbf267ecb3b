"""A driver that waits for Slurm, in as little memory as Python can do with.

A hundred waiting runs have a hundred drivers, which would hold 35 MiB each for doing nothing. So a driver whose job is
pending, or whose user has enough trainings in the queue already, replaces itself by this file, run by an interpreter
that loads next to nothing, and is started again, from scratch, as soon as that changes; everything that it knows is on
disk anyhow. The run's lock stays held, for its file stays open. Dozing drivers share one look at the queue, taken every
`SECONDS` by whichever is first.
"""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs more memory than all the rest
    from typing import NoReturn

SECONDS = 20.0
LOCK_VARIABLE = "SHARDMAKE_DRIVER_LOCK"
WAITED_VARIABLE = "SHARDMAKE_DRIVER_WAITED"
PREFIX = "shardmake-"
"""What the names of all training jobs start with."""
_ANSWERED = "\nanswered\n"


def wait_until_started(job: str, lock: int, snapshot: str) -> "NoReturn":
    """Become a dozing driver of the pending ``job`` that holds the open file ``lock``; looks lie in ``snapshot``."""
    _become("start", job, snapshot, lock=lock)


def wait_until_slot(name: str, limit: int, stop_file: str, lock: int, snapshot: str) -> "NoReturn":
    """Become a dozing driver that has yet to submit its job ``name``.

    It wakes when fewer than ``limit`` other trainings of the user are in the queue, or when somebody creates
    ``stop_file``, and finds `WAITED_VARIABLE` set.
    """
    _become("room", name, str(limit), stop_file, snapshot, lock=lock)


def _become(*words: str, lock: int) -> "NoReturn":
    os.set_inheritable(lock, True)
    os.environ[LOCK_VARIABLE] = str(lock)
    sys.stdout.flush()
    start_again = [sys.executable, *sys.orig_argv[1:]]
    os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, str(len(words)), *words, *start_again])


def await_start(job: str, snapshot: str) -> None:
    """Wait until ``job`` is no longer pending, as far as Slurm says.

    The shared look may be older than the job, so a look of now has to agree.
    """
    while is_pending(job, read_queue(snapshot)) or is_pending(job, read_queue(snapshot, 0)):
        time.sleep(SECONDS)


def await_slot(name: str, limit: str, stop_file: str, snapshot: str) -> None:
    """Wait until there is room in the queue, or a stop is asked for."""
    while not (os.access(stop_file, os.F_OK) or claim_slot(name, int(limit), snapshot)):
        time.sleep(SECONDS)
    os.environ[WAITED_VARIABLE] = "1"


def is_pending(job: str, queue: str | None) -> bool:
    """Whether the queue, one ``ID|STATE|NAME`` a line, has the job pending; no answer (None) changes nothing."""
    return queue is None or f"\n{job}|PENDING|" in f"\n{queue}"


def other_trainings(queue: str, name: str) -> list[str]:
    """Names of the trainings in the queue beside ``name``."""
    names = [line.split("|", 2)[2] for line in queue.splitlines() if line.count("|") >= 2]
    return [found for found in names if found.startswith(PREFIX) and found != name]


def claim_slot(name: str, limit: int, snapshot: str) -> bool:
    """Whether there is room for ``name``, which is then noted in the snapshot: of many that wait, one is to wake."""
    file = _open(snapshot)
    try:
        queue = _look(file, SECONDS)
        has_room = queue is not None and len(other_trainings(queue, name)) < limit
        if has_room:
            os.lseek(file, 0, os.SEEK_END)
            os.write(file, f"0|CLAIMED|{name}\n{_ANSWERED}".encode())
    finally:
        os.close(file)
    return has_room


def read_queue(snapshot: str, seconds: float = SECONDS) -> str | None:
    """The user's queue as it was at most ``seconds`` ago; None where Slurm does not answer."""
    file = _open(snapshot)
    try:
        return _look(file, seconds)
    finally:
        os.close(file)


def _open(snapshot: str) -> int:
    """The snapshot's file, locked until it is closed."""
    import fcntl

    file = os.open(snapshot, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _look(file: int, seconds: float) -> str | None:
    found = os.fstat(file)
    if not (found.st_size and 0 <= time.time() - found.st_mtime < seconds):
        _ask(file)
    content = os.pread(file, 1 << 26, 0).decode(errors="replace")
    return content.removesuffix(_ANSWERED) + "\n" if content.endswith(_ANSWERED) else None


def _ask(file: int) -> None:
    """Replace the content of ``file`` by squeue's answer, the last line saying that it is one."""
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    squeue = 'squeue --noheader --me --all --format="%i|%T|%j" 2>/dev/null && printf "\\nanswered\\n" || echo silent'
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", squeue], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, file, 1)])
    os.waitpid(pid, 0)


def main(count: str, *words: str) -> None:
    """Wait for what the first ``count`` words say, then become what the rest say: the driver again."""
    (what, *details), start_again = words[: int(count)], words[int(count) :]
    try:
        if what == "start":
            await_start(*details)
        else:
            await_slot(*details)
    except KeyboardInterrupt:
        left = f"job {details[0]} goes on" if what == "start" else "nothing was submitted"
        sys.exit(f"The driver leaves, {left}. To go on, run the same command.")
    os.execv(start_again[0], start_again)


if __name__ == "__main__":
    main(*sys.argv[1:])
