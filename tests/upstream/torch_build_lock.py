"""torch's lock of a build of an extension stays when its process is killed: every later build waits for it forever."""

import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

from torch.utils.file_baton import FileBaton


def build(lock: str) -> None:
    """Take the lock as `torch.utils.cpp_extension.load` does, and be killed in the build."""
    FileBaton(lock).try_acquire()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    lock = str(Path(tempfile.mkdtemp(), "lock"))
    killed = multiprocessing.get_context("spawn").Process(target=build, args=(lock,))
    killed.start()
    killed.join()
    print("exit status of the build:", killed.exitcode)
    print("the next build gets the lock:", FileBaton(lock).try_acquire())
