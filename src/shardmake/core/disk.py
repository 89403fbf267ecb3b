"""Disk space: free space, quotas, and swap files on node-local NVMe."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from shardmake.core.atomic import digest
from shardmake.core.errors import DiskFullError
from shardmake.core.permissions import make_private
from shardmake.core.units import format_bytes

_QUOTA_SECONDS = 20
_FEW_FILES = 1000
"""A checkpoint of two hundred ranks has about as many."""
UNLIMITED = 1 << 62
_ADVICE = "Free some space (`shardmake clean` lists removable files), or keep fewer checkpoints (checkpoints.keep)."


@dataclass(frozen=True)
class FreeSpace:
    """The bytes and the files that can still be written, and the sources of these limits."""

    free: int
    limit: str
    files: int = field(default=UNLIMITED, compare=False)
    files_limit: str = field(default="", compare=False)


def check_save(folder: Path, size: int) -> None:
    """Raise a `DiskFullError` if a checkpoint of ``size`` bytes does not fit into ``folder``."""
    require_space(folder, size, f"The next checkpoint needs {format_bytes(size)}")


def require_space(folder: Path, needed: int, sentence: str, advice: str = _ADVICE, files: int = _FEW_FILES) -> str:
    """Return ``sentence`` with the space left in ``folder``.

    Raise a `DiskFullError` with ``advice`` if ``needed`` bytes do not fit, or fewer than ``files`` can be created.
    """
    space = free_space(folder)
    text = f"{sentence}, and {folder} has {format_bytes(space.free)} left ({space.limit})."
    if needed > space.free:
        raise DiskFullError(f"{text} {advice}")
    if space.files < files:
        raise DiskFullError(
            f"{sentence}, and {folder} has only {space.files} files left ({space.files_limit}). {advice}"
        )
    return text


def free_space(folder: Path) -> FreeSpace:
    """Return the smallest limit for writes into ``folder``, which may not exist yet."""
    limits = _limits(folder)
    (free, _, limit), (_, files, files_limit) = (min(limits, key=itemgetter(column)) for column in (0, 1))
    return FreeSpace(free, limit, files, files_limit)


def _limits(folder: Path) -> list[tuple[int, int, str]]:
    """Return the bytes and files that the file system and each quota leave in ``folder``."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()).resolve()
    system, (point, quotas) = os.statvfs(existing), _quotas(existing)
    files = system.f_favail if system.f_files else UNLIMITED
    return [
        (shutil.disk_usage(existing).free, files, "free on the file system"),
        *((*left, f"your quota on {point}") for left in quotas),
    ]


def _quotas(folder: Path) -> tuple[str, list[tuple[int, int]]]:
    """Return the mount point of ``folder``, and bytes and files left in the user's quotas, as its tools report them."""
    device, point, kind = mount_of(folder, Path("/proc/mounts").read_text())
    if kind == "lustre" and shutil.which("lfs"):
        return point, quota_left(_run_tool("lfs", "quota", "-q", "-u", str(os.getuid()), point), point)
    return point, quota_left(_run_tool("quota", "-w", "-p"), device) if shutil.which("quota") else []


def _run_tool(*command: str) -> str:
    """Return the output of a quota tool, or an empty string after a timeout."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_QUOTA_SECONDS).stdout
    except subprocess.TimeoutExpired:
        return ""


def mount_of(folder: Path, mounts: str) -> tuple[str, str, str]:
    """Return device, mount point and type of the file system of ``folder``, from the text of ``/proc/mounts``.

    In a root folder of another machine (chroot), the text may have no row for it: device and type are "unknown".
    """
    rows = [line.split()[:3] for line in mounts.splitlines()]
    above = [row for row in rows if folder == Path(row[1]) or Path(row[1]) in folder.parents]
    device, point, kind = max(above, key=lambda row: len(row[1]), default=("unknown", "/", "unknown"))
    return device, point, kind


def quota_left(text: str, filesystem: str) -> list[tuple[int, int]]:
    """Return the bytes and the files left in each row that starts with ``filesystem`` and has a limit.

    ``quota -p`` and ``lfs quota`` print the same columns: used, soft and hard limit in KiB, end of grace, and the same
    for files. A ``*`` marks an exceeded quota, brackets mark a value that Lustre knows only in part. After a long name,
    the numbers are on the next line.
    """
    words = text.split()
    rows = (words[place + 1 :] for place, word in enumerate(words) if word == filesystem)
    found = [(_left(row[:3], 1024), _left(row[4:7], 1)) for row in rows]
    return [row for row in found if row != (UNLIMITED, UNLIMITED)]


def _left(columns: list[str], unit: int) -> int:
    try:
        used, soft, hard = (int(number.strip("[]*")) for number in columns)
    except ValueError:
        return UNLIMITED
    return max(0, (hard or soft) - used) * unit if hard or soft else UNLIMITED


def tree_size(folder: Path) -> int:
    """Return the bytes of all files below ``folder``, 0 if it does not exist."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def swap_folder(nvme_path: str | None, run_name: str, folder: Path) -> str:
    """Return the swap folder of a run on node-local NVMe; empty without NVMe.

    It is different for each user and each run. ``folder`` is inside the run's folder, whose path distinguishes runs
    of the same name.
    """
    if not nvme_path:
        return ""
    run_folder = next((above for above in folder.absolute().parents if above.name == run_name), folder.absolute())
    name = f"{run_name}-{digest(str(run_folder))[:8]}"
    return str(Path(nvme_path, f"shardmake-{os.getuid()}", name))


def named_swap_folders(deepspeed: Mapping[str, Any]) -> set[Path]:
    """Return the folders from `swap_folder` that DeepSpeed's settings name; other folders are the user's own choice."""
    sections = deepspeed.get("zero_optimization", {})
    named = (sections.get(section, {}).get("nvme_path", "") for section in ("offload_optimizer", "offload_param"))
    return {Path(folder) for folder in named if Path(folder).parent.name == f"shardmake-{os.getuid()}"}


def remove_swap_files(deepspeed: Mapping[str, Any]) -> None:
    """Remove the swap files of a training from this node's NVMe, because DeepSpeed does not.

    Only a folder from `swap_folder` is removed, and none that another user could have put in its place.
    """
    for folder in named_swap_folders(deepspeed):
        if make_private(folder.parent):
            shutil.rmtree(folder, ignore_errors=True)
