"""Count the processes that the kernel killed in this job's cgroup because it ran out of memory."""

import re
from pathlib import Path

_COUNTERS = {"": ("", "memory.events"), "memory": ("memory", "memory.oom_control")}
"""Folder and file below the mount point, for cgroup v2 and v1, by the controller in ``/proc/self/cgroup``."""


def oom_kills(processes: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the counter of the cgroup that this process is in, 0 if it has none."""
    kills = 0
    for line in processes.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in _COUNTERS:
                folder, name = _COUNTERS[controller]
                kills += _count(mount / folder / path.lstrip("/") / name)
    return kills


def _count(file: Path) -> int:
    found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE) if file.is_file() else None
    return int(found[1]) if found else 0
