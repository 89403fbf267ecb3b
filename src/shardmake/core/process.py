"""A process that must not outlive the one that started it."""

import ctypes
import signal
import subprocess

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel end this process with SIGKILL when its parent ends, whatever ends that.

    A parent that is gone already goes unnoticed: the caller compares `os.getppid` with what it should be.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_for_output(process: subprocess.Popen[str], seconds: float) -> str | None:
    """What ``process`` prints to its end with status 0, within ``seconds``; else None.

    One that is late is killed and not waited for: a process that the kernel holds (state D) does not die.
    """
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return None
    return printed if process.returncode == 0 else None
