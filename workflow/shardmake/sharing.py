"""Folders that a lab shares: whatever one member writes, the group can read, replace and remove."""

import getpass
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from shardmake.errors import UserError

UMASK = 0o002
_GROUP = stat.S_IRWXG | stat.S_ISGID


def share(*folders: Path) -> None:
    """Write for the group from here on, and hand its ownership down from ``folders``, which are made if need be.

    The set-group-id bit gives every file below them the group of the folder, not of whoever wrote it. A folder that
    belongs to somebody else keeps its mode: its owner decides.
    """
    os.umask(UMASK)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        _open_to_group(folder)


def share_tree(root: Path) -> None:
    """As `share`, with every folder that is below ``root`` already, made by a program that did not know better."""
    share(root)
    for folder in _folders_below(root):
        _open_to_group(folder)


def _folders_below(root: Path) -> Iterator[Path]:
    """Folders below ``root``; another user's processes may remove some meanwhile."""
    for folder, names, _ in os.walk(root):
        yield from (Path(folder, name) for name in names)


def _open_to_group(folder: Path) -> None:
    try:
        found = folder.stat()
    except FileNotFoundError:
        return
    if found.st_uid == os.getuid() and found.st_mode & _GROUP != _GROUP:
        folder.chmod(stat.S_IMODE(found.st_mode) | _GROUP)


def refuse_job_of_others(owners: dict[str, str], run: str, stop_file: str) -> None:
    """Refuse to drive ``run`` while somebody else's job trains it; ``owners`` are users by job id."""
    me = getpass.getuser()
    for job, owner in owners.items():
        if owner != me:
            raise UserError(
                f"Job {job} of {owner} is training {run}. It is not yours to adopt: wait until it ends, or ask it to "
                f"save and stop (touch {stop_file}), and run the same command again."
            )
