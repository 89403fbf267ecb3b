"""Folders that a lab shares: whatever one member writes, the group can read, replace and remove."""

import contextlib
import getpass
import os
import stat
from pathlib import Path

from shardmake.core.errors import ShardmakeError

UMASK = 0o002
_FOLDER = stat.S_IRWXG | stat.S_ISGID
_FILE = stat.S_IRGRP | stat.S_IWGRP


def share(*folders: Path) -> None:
    """Write for the group from here on, and hand its ownership down from ``folders``, which are made if need be.

    The set-group-id bit gives every file below them the group of the folder, not of whoever wrote it. A folder that
    belongs to somebody else keeps its mode: its owner decides.
    """
    os.umask(UMASK)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        _open_to_group(folder, _FOLDER)


def share_tree(root: Path) -> None:
    """As `share`, with everything of this user below ``root``: some libraries write files for their owner only."""
    share(root)
    for folder, folders, files in os.walk(root):
        for name in folders:
            _open_to_group(Path(folder, name), _FOLDER)
        for name in files:
            _open_to_group(Path(folder, name), _FILE)


def _open_to_group(path: Path, mode: int) -> None:
    """Add ``mode`` to what is this user's; another process may have removed it meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if found.st_uid == os.getuid() and not stat.S_ISLNK(found.st_mode) and found.st_mode & mode != mode:
            path.chmod(stat.S_IMODE(found.st_mode) | mode)


def refuse_job_of_others(owners: dict[str, str], run: str, stop_file: str) -> None:
    """Refuse to drive ``run`` while somebody else's job trains it; ``owners`` are users by job id."""
    me = getpass.getuser()
    for job, owner in owners.items():
        if owner != me:
            raise ShardmakeError(
                f"Job {job} of {owner} is training {run}. It is not yours to adopt: wait until it ends, or ask it to "
                f"save and stop (touch {stop_file}), and run the same command again."
            )
