"""Temporary folders that a killed process leaves behind only until the next process needs one in the same place."""

import atexit
import contextlib
import fcntl
import glob
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PREFIX: Final = f"shardmake-{socket.gethostname()}_"
"""With the host's name, because some shared file systems know only the locks of their own host."""
_LOCK: Final = ".in-use"
_CONTENT: Final = "content"


@contextlib.contextmanager
def temporary_folder(purpose: str, parent: str | Path | None = None) -> Iterator[Path]:
    """Yield a new, empty folder of this user alone below ``parent``, by default below the system's temporary folder.

    This process holds a lock beside it. Folders that this host made in ``parent`` and whose locks are free are removed
    before: their processes were killed. On a file system without locks such folders stay.
    """
    parent = Path(parent or tempfile.gettempdir())
    _remove_abandoned(parent)
    folder, lock = _create(purpose, parent)
    try:
        (folder / _CONTENT).mkdir(mode=0o700)
        yield folder / _CONTENT
    finally:
        _remove(folder, lock)


def process_folder(purpose: str, parent: str | Path | None = None) -> Path:
    """Return a `temporary_folder` that is removed when this process ends."""
    stack = contextlib.ExitStack()
    folder = stack.enter_context(temporary_folder(purpose, parent))
    atexit.register(stack.close)
    return folder


def _create(purpose: str, parent: Path) -> tuple[Path, int]:
    """Return a new folder and the descriptor of its lock, which a program that replaces this process inherits.

    Before the new file is locked, another process may take the folder for an abandoned one and remove it. Then the
    next one is made.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", dir=parent))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if take_lock(lock, without_locks=True) and (folder / _LOCK).exists():
            os.set_inheritable(lock, True)
            return folder, lock
        os.close(lock)


def take_lock(lock: int, *, without_locks: bool, shared: bool = False) -> bool:
    """Lock an open file, alone or ``shared``; return False if others hold it, ``without_locks`` if there are none."""
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return without_locks
    return True


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{glob.escape(_PREFIX)}*"):
        with contextlib.suppress(OSError):  # without a lock, so not one of these, or removed at this moment
            found = folder.lstat()
            rights = stat.S_IMODE(found.st_mode) & 0o777  # a folder of a group passes its set-group-id bit on
            if not (stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and rights == stat.S_IRWXU):
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            if take_lock(lock, without_locks=False):
                _remove(folder, lock)
            else:
                os.close(lock)


def _remove(folder: Path, lock: int) -> None:
    """Remove the content first: if this is killed too, the lock still marks the rest as abandoned.

    The lock is closed before its folder is removed, because NFS keeps a deleted file there while it is open.
    """
    shutil.rmtree(folder / _CONTENT, ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / _LOCK).unlink()
    os.close(lock)
    with contextlib.suppress(OSError):
        folder.rmdir()
