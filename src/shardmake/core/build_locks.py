"""The locks under which torch builds kernels, and the removal of those that a killed process left behind.

torch builds the kernel NAME, such as DeepSpeed's Adam for CPUs, under the lock ``NAME/lock``. The file itself is the
lock: its owner keeps it open during the build, and then closes and deletes it. If the owner is killed, every later
process waits for the lock forever. From torch 2.14 on the system locks the file, until its owner ends; the file stays.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from shardmake.core.disk import mount_of

LOCKED_BY_THE_SYSTEM = Version("2.14")
LONGEST_BUILD_SECONDS = 3600.0
"""Age above which a lock is stale although its owner may run where this process cannot see it."""
_RELEASE_SECONDS = 0.5
"""An owner needs less time between closing and deleting its lock."""
_NODE_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"})
_HOST_PROCESSES = "pid:[4026531836]"  # PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h


def build_locks(kernels: Path) -> list[Path]:
    """Return the locks of builds in ``kernels``, the value of ``TORCH_EXTENSIONS_DIR``."""
    return sorted(kernels.glob("*/lock"))


def remove_stale_locks(kernels: Path) -> list[str]:
    """Delete the locks in ``kernels`` whose owner has ended, and return a message for each lock that nobody holds.

    A lock is stale if no process of this host has the file open. If the owner may run on another host or in another
    container, the lock must in addition be older than any build takes; otherwise it stays and is reported.
    """
    locks = _without_owner(build_locks(kernels))
    if not locks or Version(version("torch")) >= LOCKED_BY_THE_SYSTEM:
        return []
    time.sleep(_RELEASE_SECONDS)
    locks = _without_owner(locks)
    everyone_visible = _sees_every_owner(kernels, Path("/proc/mounts").read_text())
    messages = []
    for lock in locks:
        if everyone_visible or _age(lock) > LONGEST_BUILD_SECONDS:
            lock.unlink(missing_ok=True)
            messages.append(f"Removed {lock}: a process that was killed while it built a kernel left this lock behind.")
        else:
            messages.append(
                f"Ranks may wait for {lock}. No process of this host holds this lock of a kernel's build, but one of "
                "another host may. If none does, delete the file. Scratch on a local disk avoids the question."
            )
    return messages


def _without_owner(locks: Sequence[Path]) -> list[Path]:
    """Return the locks that exist and that no visible process has open."""
    numbers = {lock: (status.st_dev, status.st_ino) for lock in locks if (status := _status(lock))}
    held = _open_locks() if numbers else set()
    return [lock for lock, number in numbers.items() if number not in held]


def _open_locks() -> set[tuple[int, int]]:
    """Return device and inode of every open file named ``lock``, of all processes that this user may inspect."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's process, or one that has just ended
            # The name comes first: `stat` could block on a file of a network file system that does not answer.
            named = [path for path in (process / "fd").iterdir() if _is_lock(path)]
            found |= {(status.st_dev, status.st_ino) for path in named if (status := _status(path))}
    return found


def _is_lock(descriptor: Path) -> bool:
    with contextlib.suppress(OSError):  # just closed
        return descriptor.readlink().name == "lock"
    return False


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _sees_every_owner(kernels: Path, mounts: str) -> bool:
    """Return whether every process that can use ``kernels`` is visible in ``/proc``.

    Only the host's own process namespace shows all processes of the host. Inside a container, the container's own
    root file system (overlay) is shared with no other.
    """
    kind = mount_of(kernels.resolve(), mounts)[2]
    return kind in _NODE_LOCAL and (kind == "overlay" or _process_namespace() == _HOST_PROCESSES)


def _process_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _age(lock: Path) -> float:
    """Return the seconds since ``lock`` was created, by the clock of its file system."""
    with tempfile.TemporaryFile(dir=lock.parent) as probe:
        now = os.fstat(probe.fileno()).st_mtime
    status = _status(lock)
    return now - status.st_mtime if status else 0.0
