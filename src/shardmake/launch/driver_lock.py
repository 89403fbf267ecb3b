"""One driver per run, guarded by a lock on the run's folder."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator

from shardmake.core.errors import ShardmakeError
from shardmake.launch.low_memory_wait import LOCK_VARIABLE
from shardmake.run.paths import RunDir


@contextlib.contextmanager
def hold_driver_lock(rundir: RunDir) -> Iterator[int]:
    """Hold the run's lock and yield its descriptor. A driver that waited in low memory has the lock already.

    Raises:
        ShardmakeError: another driver holds the lock, or the file system has no locks.
    """
    held = os.environ.pop(LOCK_VARIABLE, None)
    with open(int(held), "a+") if held else (rundir.train / "driver.lock").open("a+") as lock:  # noqa: PTH123
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ShardmakeError(
                f"Another driver is already watching {rundir.name}: {lock.read().strip()}. Wait until that driver "
                "ends, or end it: the job keeps running without a driver."
            ) from None
        except OSError as error:
            raise ShardmakeError(
                f"Cannot lock {rundir.train}: its file system has no file locks ({error.strerror}). Two drivers could "
                "train the same run. Mount the file system with locks (Lustre: -o flock), or put runs/ elsewhere."
            ) from None
        lock.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
        yield lock.fileno()
