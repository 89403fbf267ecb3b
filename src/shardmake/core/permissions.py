"""Folders shared in a lab: the group can read, replace and remove the files of every member."""

import contextlib
import getpass
import os
import stat
from pathlib import Path

from shardmake.core.errors import SlurmError

UMASK = 0o002
_FOLDER = stat.S_IRWXG | stat.S_ISGID
_FILE = stat.S_IRGRP | stat.S_IWGRP


def share(*folders: Path) -> None:
    """Make new files of this process writable for the group, and create ``folders`` for the group.

    The set-group-id bit gives each file below them the group of the folder. A folder of another user keeps its mode.
    """
    os.umask(UMASK)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        _open_to_group(folder, _FOLDER)


def share_tree(root: Path) -> None:
    """Share ``root`` and all files of this user below it, because some libraries write files for their owner only."""
    share(root)
    for folder, folders, files in os.walk(root):
        for name in folders:
            _open_to_group(Path(folder, name), _FOLDER)
        for name in files:
            _open_to_group(Path(folder, name), _FILE)


def _open_to_group(path: Path, mode: int) -> None:
    """Add ``mode`` to ``path`` if this user owns it and it still exists."""
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if found.st_uid == os.getuid() and not stat.S_ISLNK(found.st_mode) and found.st_mode & mode != mode:
            path.chmod(stat.S_IMODE(found.st_mode) | mode)


def refuse_job_of_others(owners: dict[str, str], run: str, stop_file: str) -> None:
    """Raise a `SlurmError` if another user's job trains ``run``; ``owners`` are users by job id."""
    me = getpass.getuser()
    for job, owner in owners.items():
        if owner != me:
            raise SlurmError(
                f"Run {run} is being trained by job {job} of {owner}. You cannot adopt it. Wait until it ends, or let "
                f"it save and stop (touch {stop_file}). Then run the same command again."
            )
