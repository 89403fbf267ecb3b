"""Child processes: their import path, deadlines, and an end together with the parent."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

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
