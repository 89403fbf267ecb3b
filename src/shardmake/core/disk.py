"""Room on disk: what a run will need against what the file system and the user's quota leave."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from shardmake.core.errors import ShardmakeError
from shardmake.core.units import GIB, format_bytes

_QUOTA_SECONDS = 20
_ADVICE = "Free some space (`shardmake clean` lists what can go), or keep fewer checkpoints (checkpoints.keep)."


@dataclass(frozen=True)
class FreeSpace:
    """Bytes that may still be written, and what sets the limit."""

    free: int
    limit: str


def check_download(folder: Path, size: int) -> None:
    """Refuse to fetch ``size`` bytes into the hub's cache around ``folder`` that will not fit."""
    require_space(folder, size, f"The base model's weights need {size / GIB:.1f} GiB")


def check_save(folder: Path, size: int) -> None:
    """Refuse a save of ``size`` bytes into ``folder`` that will not fit."""
    require_space(folder, size, f"The next checkpoint needs {format_bytes(size)}")


def require_space(folder: Path, needed: int, sentence: str) -> str:
    """Return ``sentence`` with what is left for ``folder``; raise `ShardmakeError` if ``needed`` bytes do not fit."""
    room = free_space(folder)
    both = f"{sentence}, and {folder} has {format_bytes(room.free)} left ({room.limit})."
    if needed > room.free:
        raise ShardmakeError(f"{both} {_ADVICE}")
    return both


def free_space(folder: Path) -> FreeSpace:
    """What may still be written into ``folder``, which need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    rooms = [FreeSpace(shutil.disk_usage(there).free, "free on the file system"), *_quotas(there)]
    return min(rooms, key=lambda room: room.free)


def _quotas(folder: Path) -> list[FreeSpace]:
    """What the user's quotas leave on the file system of ``folder``, as far as its own tools say."""
    device, point, kind = mount_of(folder, Path("/proc/mounts").read_text())
    if kind == "lustre" and shutil.which("lfs"):
        text = _ask("lfs", "quota", "-q", "-u", str(os.getuid()), point)
        return [FreeSpace(left, f"your quota on {point}") for left in quota_left(text, point)]
    if shutil.which("quota"):
        return [FreeSpace(left, f"your quota on {point}") for left in quota_left(_ask("quota", "-w"), device)]
    return []


def _ask(*command: str) -> str:
    """What a quota tool prints; nothing where it does not answer, because free space is checked all the same."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_QUOTA_SECONDS).stdout
    except subprocess.TimeoutExpired:
        return ""


def mount_of(folder: Path, mounts: str) -> tuple[str, str, str]:
    """Device, mount point and type of the file system of ``folder``, from the text of ``/proc/mounts``."""
    rows = [line.split()[:3] for line in mounts.splitlines()]
    above = [row for row in rows if folder == Path(row[1]) or Path(row[1]) in folder.parents]
    device, point, kind = max(above, key=lambda row: len(row[1]))
    return device, point, kind


def quota_left(text: str, filesystem: str) -> list[int]:
    """Bytes left of the block quota in a row that starts with ``filesystem``; none where no limit is set.

    ``quota`` and ``lfs quota`` print the same columns: used, soft and hard limit, in KiB; ``*`` marks one over, and
    brackets what Lustre knows in part only. After a long name, the numbers stand on the next line. A row that is
    something else says nothing.
    """
    words = text.split()
    found = []
    for place in (index for index, word in enumerate(words) if word == filesystem):
        try:
            used, soft, hard = (int(number.strip("[]*")) for number in words[place + 1 : place + 4])
        except ValueError:
            continue
        if limit := hard or soft:
            found.append(max(0, limit - used) * 1024)
    return found


def tree_size(folder: Path) -> int:
    """Bytes of all files below ``folder``; 0 where it is not there."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
