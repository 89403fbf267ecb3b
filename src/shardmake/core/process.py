"""Child processes: their import path, deadlines, limits, and an end together with the parent."""

import ctypes
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

from shardmake.core.errors import ShardmakeError
from shardmake.core.units import format_bytes

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
NEUTRAL_FOLDER = Path("/")
"""Current folder of a process that must not find a user's files by relative names."""


def absolute_python_path(environment: Mapping[str, str]) -> str:
    """Return PYTHONPATH for a child process in any folder, which can import this package.

    An empty entry, as in ``PYTHONPATH=a:``, would mean the child's current folder.
    """
    inherited = environment.get("PYTHONPATH", "").split(os.pathsep)
    paths = [Path(__file__).parents[2], *(Path(path) for path in inherited if path)]
    return os.pathsep.join(dict.fromkeys(str(path.absolute()) for path in paths))


def die_with_parent() -> None:
    """Let the kernel end this process with SIGKILL as soon as its parent ends.

    This has no effect if the parent has ended already. The caller therefore compares `os.getppid` with the expected
    process id.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit(seconds: int, memory: int) -> None:
    """Let the kernel end this process after ``seconds``, and refuse it more than ``memory`` further bytes."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
    present = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (present + memory,) * 2)


def within_limits(doing: str, function: Callable[[], T], *, seconds: int = 300, memory: int = 4 << 30) -> T:
    """Return ``function()`` from a fork of this process that the kernel limits to ``seconds`` and ``memory`` bytes.

    It opens what other people wrote: a template may render forever, and a file may crash a library. Only the result
    and exceptions come back. A `ShardmakeError` is raised if the fork reached a limit or crashed while ``doing``.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        end_fork(writer, lambda: _result(function), seconds, memory)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            answer = pipe.read()
    except BaseException:  # such as Ctrl-C
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, ended = os.waitpid(child, 0)
    status = os.waitstatus_to_exitcode(ended)
    if status == 0 and answer:
        value, error = pickle.loads(answer)
        if error is None:
            return value
        if not isinstance(error, MemoryError):
            raise error
        reason = f"it needed more than {format_bytes(memory)}"
    else:
        late = status == -signal.SIGALRM
        reason = f"it took longer than {seconds} s" if late else f"a library ended the process with status {status}"
    raise ShardmakeError(
        f"{doing} failed: {reason}. A template, file or row needs more than a check before a job may take. Use another "
        "one."
    )


def _result(function: Callable[[], object]) -> bytes:
    """Return the result of ``function`` and None, or None and its exception, for the parent."""
    try:
        return pickle.dumps((function(), None))
    except Exception as found:
        if not isinstance(found, ShardmakeError):
            found.add_note(traceback.format_exc())
        return pickle.dumps((None, found))


def end_fork(writer: int, answer: Callable[[], bytes], seconds: int, memory: int) -> NoReturn:
    """Write ``answer()`` to the pipe of the parent and end this fork with status 0, or 1 if it fails.

    The kernel ends the fork with its parent and at the limits. The caller's frames are those of the parent, so the
    fork never returns.
    """
    status = 1
    try:
        die_with_parent()
        _limit(seconds, memory)
        text = answer()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(text)
        status = 0
    except Exception:  # a panic of a library in Rust is none, and has printed its message
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def wait_until(condition: Callable[[], object], seconds: float, longest: float = 2.0) -> bool:
    """Return whether ``condition`` holds within ``seconds``; the pauses grow from 0.1 s to ``longest`` seconds."""
    deadline, pause = time.monotonic() + seconds, min(0.1, longest)
    while not (holds := bool(condition())) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
    return holds


def wait_for_output(process: subprocess.Popen[str], seconds: float) -> str | None:
    """Return the output of ``process``, or None if it fails or does not end within ``seconds``.

    A late process is killed but not waited for, because a process in state D does not end.
    """
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return None
    return printed if process.returncode == 0 else None


SECONDS = 60.0
"""Without the persistence daemon, the driver needs many seconds to start eight GPUs."""


def ask_nvidia_smi(*options: str) -> str | None:
    """Return what nvidia-smi prints, empty if it fails; None if it is missing or does not answer in time."""
    try:
        process = subprocess.Popen(
            ["nvidia-smi", *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None
    answer = wait_for_output(process, SECONDS)
    return "" if answer is None and process.returncode is not None else answer


def query_gpus(fields: str) -> str | None:
    """Return a row of comma-separated ``fields`` for each GPU, as `ask_nvidia_smi` does."""
    return ask_nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
