"""Folders shared in a lab, whose files the group can read, replace and remove, and folders of one user alone."""

import contextlib
import getpass
import logging
import os
import stat
from functools import cache
from pathlib import Path

from shardmake.core.errors import SlurmError
from shardmake.core.run_folder import descriptor
from shardmake.core.temporary import process_folder

logger = logging.getLogger(__name__)
_GROUP_BITS = 0o070
_FOLDER = stat.S_IRWXG | stat.S_ISGID
_FILE = stat.S_IRGRP | stat.S_IWGRP


def share(*folders: Path) -> None:
    """Make new files of this process writable for the group, and create ``folders`` for the group.

    The set-group-id bit gives each file below them the group of the folder. A folder of another user keeps its mode.
    The rights of others stay as the user's umask has them.
    """
    before = os.umask(0o077)
    os.umask(before & ~_GROUP_BITS)
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
    with contextlib.suppress(FileNotFoundError):
        add_mode(path, mode)


def add_mode(path: Path, mode: int) -> None:
    """Add ``mode`` to a file or folder of this user, if the file system permits it; a link is not followed."""
    found = path.lstat()
    if found.st_uid != os.getuid() or stat.S_ISLNK(found.st_mode) or found.st_mode & mode == mode:
        return
    # The group may put a link in place of the path at any moment, so the mode is changed through what is open.
    with contextlib.suppress(OSError):
        file = descriptor(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            found = os.fstat(file)
            if found.st_uid == os.getuid():
                os.fchmod(file, stat.S_IMODE(found.st_mode) | mode)
        finally:
            os.close(file)


@cache
def private_folder(path: Path) -> Path:
    """Create the folder ``path`` for this user alone and return it, or a new one if ``path`` cannot be trusted.

    Programs load code from such a folder. In a folder that everybody may write to, another user can make ``path``
    before, as a folder or as a link, and put code there. The new folder lasts as long as this process. A path whose
    parent does not exist here is returned as it is.
    """
    if not path.parent.is_dir():
        return path
    if make_private(path):
        return path
    purpose = path.name.removeprefix("shardmake-")
    try:
        fresh = process_folder(purpose, path.parent)
    except OSError:
        fresh = process_folder(purpose)
    logger.warning("%s is not a folder of this user alone, so %s is used. Remove it if it is yours.", path, fresh)
    return fresh


def make_private(path: Path) -> bool:
    """Create the folder ``path`` for this user alone; return whether it is one, without following a link."""
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700)
    return _belongs_to_us(path)


def _belongs_to_us(path: Path) -> bool:
    """Return whether ``path`` is a folder of this user that others could not write to; take the group's rights away."""
    try:
        found = path.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & stat.S_IWOTH:
        return False
    if stat.S_IMODE(found.st_mode) != stat.S_IRWXU:
        path.chmod(stat.S_IRWXU)
    return True


def refuse_job_of_others(owners: dict[str, str], run: str, stop_file: str) -> None:
    """Raise a `SlurmError` if another user's job trains ``run``; ``owners`` are users by job id."""
    me = getpass.getuser()
    for job, owner in owners.items():
        if owner != me:
            raise SlurmError(
                f"Run {run} is being trained by job {job} of {owner}. You cannot adopt it. Wait until it ends, or let "
                f"it save and stop (touch {stop_file}). Then run the same command again."
            )
