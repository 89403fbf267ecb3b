"""A driver that waits for Slurm or watches its job, in as little memory as Python needs, and one squeue query for all.

A hundred runs have a hundred drivers, and each would hold 35 MiB only to look at a few files. So a driver replaces
itself by this file, in an interpreter that loads next to nothing and no other file of the package. It waits until its
user has fewer trainings in the queue, or watches its job: it shows progress from the run's folder, and state from
squeue. When something has to be decided, the driver starts again: its state is on disk. The run's lock stays held,
because its file stays open.

All drivers of a user on this machine share one query: the first one whose snapshot is too old runs squeue for all of
the user's jobs, and leaves the answer for the others. The slower Slurm answers, the longer an answer counts: together
the drivers keep the controller busy for at most a twentieth of the time. But none waits longer than a minute: a query
that was slow because the controller restarted must not hide what happened then.

A snapshot is squeue's rows and a last line: ``answered SECONDS``, or ``failed SECONDS``.
"""

# ruff: noqa: PTH116, PTH119, PTH123, PTH208

import json
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs more memory than all the rest
    from collections.abc import Callable
    from typing import Any, NoReturn

SECONDS = 20.0
POLL_SECONDS = 3.0
"""Between two looks at the files of a run: all of them together are less than four requests a second."""
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
SNAKEMAKE_VARIABLE = "SHARDMAKE_SNAKEMAKE"
"""Process id of the Snakemake that started the driver; empty or missing if a person did."""
HELD_VARIABLE = "SHARDMAKE_HELD_JOB"
"""Names a job that the driver has reported as one that waits for a person."""
REASON_VARIABLE = "SHARDMAKE_HELD_REASON"
"""Squeue's reason that a job has waited for so long that the driver reports it."""
READ_VARIABLE = "SHARDMAKE_READ_BYTES"
"""Names the log that the process before this one read, and how far it had read metrics and log."""
_NEEDS_PERSON = (
    "held", "Held", "NeverSatisfied", "BadConstraints", "Invalid", "NotAllowed", "TimeLimit", "PerJob", "PerNode",
    "MaxMemPerLimit", "QOSMin", "UsageThreshold", "ReservationDeleted",
    "Minutes",  # the account's budget is used up
)  # fmt: skip
"""Parts of squeue's reasons for which Slurm keeps a job pending until a person acts."""
_MAY_NEED_PERSON = (
    "AssocGrp", "QOSGrp", "ReqNodeNotAvail", "Reservation", "Partition",
    "CpuPer", "GRESPer", "MemoryPer", "NodePer",  # of all jobs of a person or an account
)  # fmt: skip
"""The same for reasons that other jobs' ends, or the site, may remove: a person is called after `PATIENCE` seconds."""
PATIENCE = 3600.0
PREFIX = "shardmake-"
"""Start of the names of all training jobs."""


def watch_in_low_memory(
    job: str, state: str, files: "tuple[str, str, str, str]", ends: str, lock: int, snapshot: str, quiet: bool
) -> "NoReturn":
    """Watch ``job``, last seen in ``state``, in low memory; the open file ``lock`` stays locked.

    ``files`` are the run's metrics and receipt, the log of node 0 and the attempt's folder; ``ends`` is printed if a
    signal ends the driver. The driver starts again when the job has ended, or newly waits for a person.
    """
    _replace_process("job", job, state, *files, ends, snapshot, "quiet" * quiet, lock=lock)


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


class AppendedLines:
    """The lines appended to a file from now on; after a resumed attempt rewrote it, the first may be a part of one."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.offset = self._size()

    def _size(self) -> int:
        try:
            return os.stat(self.file).st_size
        except OSError:  # also a shared file system that fails for a moment
            return 0

    def read(self) -> "list[str]":
        """Return the complete lines since the last call. After the file was shortened, reading starts at its end."""
        size = self._size()
        if size <= self.offset:
            self.offset = size
            return []
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        self.offset += len(complete) + len(newline)
        return complete.decode(errors="replace").splitlines()


class Progress:
    """Shows what an attempt appends to its metrics, at a readable pace, and rank 0's warnings, at once."""

    def __init__(self, metrics: str, log: str, say: "Callable[[str], object]", warn: "Callable[[str], object]") -> None:
        self.metrics, self.log = AppendedLines(metrics), AppendedLines(log)
        before, *offsets = os.environ.pop(READ_VARIABLE, "").split("\n")
        if before == log:
            self.metrics.offset, self.log.offset = map(int, offsets)
        self.say, self.warn = say, warn
        self.said_at = float("-inf")

    def hand_over(self) -> None:
        """Let the program that takes this one's place read on from here."""
        os.environ[READ_VARIABLE] = f"{self.log.file}\n{self.metrics.offset}\n{self.log.offset}"

    def poll(self) -> None:
        """Show new warnings and evaluations, and the newest step if enough time has passed."""
        for text in self.log.read():
            if text.startswith(RANK_0_WARNING):
                self.warn(text.removeprefix(RANK_0_WARNING))
        lines = [line for line in map(_parse, self.metrics.read()) if line]
        for line in lines:
            if "eval_loss" in line:
                self.say(f"step {line['step']:>6}  evaluation loss {line['eval_loss']:.4f}")
        steps = [line for line in lines if "loss" in line]
        if steps and time.monotonic() - self.said_at >= POLL_SECONDS:
            self.said_at = time.monotonic()
            self.say(_describe_step(steps[-1]))


def _parse(text: str) -> "dict[str, Any]":
    """Return the numbers of a line of metrics; nothing if it is not one, because scripts write lines of their own."""
    try:
        line = json.loads(text)
    except ValueError:
        return {}
    found = {key: value for key, value in line.items() if type(value) in (int, float)} if type(line) is dict else {}
    return found if type(found.get("step")) is int else {}


def _describe_step(line: "dict[str, Any]") -> str:
    speed = f"  {line['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in line else ""
    rate = f"  learning rate {line['learning_rate']:.2e}" if "learning_rate" in line else ""
    return f"step {line['step']:>6}  loss {line['loss']:.4f}{rate}{speed}"


def describe(state: str, nodes: str) -> str:
    """Return the state of a job in a sentence, with its nodes or the reason why it waits, if Slurm gives one."""
    preposition = "on " if state == RUNNING else ""
    known = "" if nodes in ("", "(None)") else f" {preposition}{nodes}"
    return f"The job is {state}{known}."


def watch_job(
    job: str, state: str, metrics: str, receipt: str, log: str, folder: str, ends: str, snapshot: str, quiet: str
) -> None:
    """Watch ``job`` until the driver has to decide something; see `watch_in_low_memory`."""
    say = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
    progress = Progress(metrics, log, say, lambda text: print("WARNING:", text, file=sys.stderr, flush=True))
    asked, since, before = float("-inf"), time.monotonic(), ""
    listed: float | None = -1.0
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:
            signal.signal(getattr(signal, name), _interrupt)
    try:
        while not is_orphan():
            progress.poll()
            if os.access(receipt, os.F_OK) or (listed := _has_exit(folder, listed or 0.0)) is None:
                break
            if time.monotonic() - asked >= SECONDS:
                asked = time.monotonic()
                found = _row_of(job, snapshot)
                if found is None:
                    break
                seen, nodes = found
                if nodes != before:
                    if before and seen == state == RUNNING:  # Slurm removed a node
                        break
                    before, since = nodes, time.monotonic()
                if seen == PENDING and is_newly_held(job, nodes, time.monotonic() - since):
                    os.environ[REASON_VARIABLE] = nodes
                    break
                if state == RUNNING and seen == PENDING:
                    say(REQUEUED)
                if seen and seen != state:
                    say(describe(seen, nodes))
                state = seen or state
            time.sleep(POLL_SECONDS)
        else:
            raise KeyboardInterrupt(KILLED)
        progress.poll()
    except KeyboardInterrupt as stop:
        print(f"{stop.args[0]}: {ends}", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    progress.hand_over()
    os.environ[STARTED_VARIABLE] = job


PENDING, RUNNING = "pending", "running"
STATES = {
    PENDING: "PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED RESV_DEL_HOLD SPECIAL_EXIT",
    RUNNING: "RUNNING COMPLETING SUSPENDED STOPPED SIGNALING STAGE_OUT RESIZING",
}
"""Slurm's names of the states in which a job has not ended."""
KILLED = "The Snakemake of this driver was killed"
REQUEUED = "Slurm put the job back into the queue. It will resume from its newest checkpoint."
RANK_0_WARNING = "[rank 0] WARNING: "
"""Begin of a warning of rank 0, by `shardmake.core.log`."""


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _has_exit(folder: str, listed: float) -> "float | None":
    """Return when the attempt's ``folder`` changed last, which is listed only after a change; None if a node ended."""
    try:
        changed = os.stat(folder).st_mtime
        names = os.listdir(folder) if changed != listed else []
    except OSError:  # a shared file system may fail for a moment
        return listed
    return None if any(name.startswith("node-") and name.endswith(".json") for name in names) else changed


def _row_of(job: str, snapshot: str) -> "tuple[str, str] | None":
    """Return a job's state, and its nodes or why it waits; None if it has ended. Without an answer the state is empty.

    A shared snapshot may be older than the job, so a new query has to confirm that it is not listed.
    """
    for max_age in (SECONDS, 0.0):
        queue = cached_squeue(snapshot, max_age)
        if queue is None:
            return "", ""
        _, found, after = f"\n{queue}".partition(f"\n{job}|")
        name, nodes, *_ = f"{after}||".split("|")
        for state, names in STATES.items():
            if found and name in names.split():
                return state, nodes
    return None


def snakemake_above() -> str:
    """Return the id of the Snakemake process that started this driver; empty if a person did."""
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/cmdline", errors="replace") as file:
                words = file.read().split("\0")
            with open(f"/proc/{pid}/stat", errors="replace") as file:
                above = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            return ""
        if any(os.path.basename(word) == "snakemake" for word in words[:4]):
            return str(pid)
        pid = above
    return ""


def is_orphan() -> bool:
    """Return whether the Snakemake that started this driver was killed, so that nobody reads its end any more."""
    try:
        os.kill(int(os.environ.get(SNAKEMAKE_VARIABLE) or os.getpid()), 0)
    except OSError:
        return True
    return False


def await_slot(name: str, limit: str, stop_file: str, snapshot: str) -> None:
    """Wait until a slot in the queue is free, or the stop file exists."""
    asked = float("-inf")
    try:
        while not os.access(stop_file, os.F_OK):
            if is_orphan():
                raise KeyboardInterrupt
            if time.monotonic() - asked >= SECONDS:
                asked = time.monotonic()
                if claim_slot(name, int(limit), snapshot):
                    break
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        print("The driver exits, no job was submitted. To continue, run the same command again.", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    os.environ[WAITED_VARIABLE] = "1"


def is_newly_held(job: str, reason: str, seconds: float = 0.0) -> bool:
    """Return whether the pending ``job``, with ``reason`` for ``seconds``, waits for a person, not reported before."""
    if not needs_person(reason, seconds):
        if not may_need_person(reason):
            os.environ.pop(HELD_VARIABLE, None)  # if it is held once more, that is reported again
        return False
    return os.environ.get(HELD_VARIABLE) != job


def needs_person(reason: str, seconds: float = 0.0) -> bool:
    """Return whether Slurm keeps a job pending for ``reason``, as squeue prints it, until a person acts."""
    return any(part in reason for part in _NEEDS_PERSON) or (may_need_person(reason) and seconds >= PATIENCE)


def may_need_person(reason: str) -> bool:
    """Return whether ``reason`` may last until a person acts."""
    return any(part in reason for part in _MAY_NEED_PERSON)


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
    """Wait or watch as the first ``count`` words say, then run the command in the rest of them: the driver again."""
    (what, *details), start_again = words[: int(count)], words[int(count) :]
    if what == "job":
        watch_job(*details)
    else:
        await_slot(*details)
    try:
        os.execv(start_again[0], start_again)
    except OSError as error:
        print(
            f"Cannot start the driver again: {start_again[0]}: {error.strerror}. Somebody moved or removed the "
            "checkout. Move it back and run the same command again, which adopts the job.",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
