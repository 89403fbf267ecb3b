"""A process that must not outlive the one that started it."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel end this process with SIGKILL when its parent ends, whatever ends that.

    A parent that is gone already goes unnoticed: the caller compares `os.getppid` with what it should be.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
