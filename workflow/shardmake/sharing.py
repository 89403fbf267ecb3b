"""Folders that a lab shares: whatever one member writes, the group can read, replace and remove."""

import os
import stat
from pathlib import Path

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
        found = folder.stat()
        if found.st_uid == os.getuid():
            folder.chmod(stat.S_IMODE(found.st_mode) | _GROUP)
