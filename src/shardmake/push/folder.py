"""Push to a folder: copied beside it, checked, renamed. A reader sees the old model or the new one, never half."""

import errno
import os
import shutil
from pathlib import Path

from shardmake.core.atomic import fsync_directory
from shardmake.core.disk import free_space
from shardmake.core.errors import ShardmakeError
from shardmake.core.manifest import SUMS, differences, parse_sums, read_folder
from shardmake.core.units import format_bytes
from shardmake.push.bundle import Bundle


def push_to_folder(bundle: Bundle, target: Path) -> None:
    """Make ``target`` hold exactly ``bundle``; a target that holds it already is not touched.

    Raises `ShardmakeError` if the target is somebody else's or cannot be written.
    """
    try:
        _settle_leftovers(target)
        _refuse_foreign(target)
        if not (target.is_dir() and read_folder(target) == bundle.manifest):
            _replace(bundle, target)
    except OSError as error:
        raise ShardmakeError(
            f"The model cannot be written to {target}: {error.strerror} ({error.filename}). "
            f"{_remedy(error)}, or choose another one in push.to, and push again."
        ) from error


def _remedy(error: OSError) -> str:
    return "Free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Make that folder writable"


def _refuse_foreign(target: Path) -> None:
    """A folder may be replaced only if an earlier push wrote every file in it."""
    advice = "Choose another folder in push.to, or move this one away."
    if not target.exists():
        return
    if not target.is_dir():
        raise ShardmakeError(f"{target} is a file, so no model can be pushed there. {advice}")
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir()}
    sums = target / SUMS
    ours = {*parse_sums(sums.read_text()), SUMS} if sums.is_file() else set()
    if foreign := sorted(names - ours):
        raise ShardmakeError(
            f"{target} holds files that no push of Shardmake wrote ({', '.join(foreign[:3])}"
            f"{', ...' if len(foreign) > 3 else ''}), so it is not replaced. {advice}"
        )


def _replace(bundle: Bundle, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    _check_space(bundle, target.parent)
    staging = _beside(target, "pushing")
    try:
        _copy(bundle, staging)
        _exchange(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _exchange(staging: Path, target: Path) -> None:
    """Put ``staging`` in the place of ``target``; if that fails, the old folder stays."""
    retired = _beside(target, "retired")
    if target.exists():
        target.rename(retired)
    try:
        staging.rename(target)
    except OSError:
        retired.rename(target)
        raise
    fsync_directory(target.parent)
    shutil.rmtree(retired, ignore_errors=True)


def _copy(bundle: Bundle, staging: Path) -> None:
    """Copy and fsync every file, then read the copies back."""
    for name, source in bundle.paths.items():
        destination = staging / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, destination)
        with destination.open("rb") as file:
            os.fsync(file.fileno())
    for folder in {(staging / name).parent for name in bundle.paths}:
        fsync_directory(folder)
    if wrong := differences(bundle.manifest, read_folder(staging)):
        raise ShardmakeError(
            f"The copy beside the target is damaged ({'; '.join(wrong)}). Check the disk and push again."
        )


def _check_space(bundle: Bundle, folder: Path) -> None:
    room = free_space(folder)
    if room.free < bundle.size:
        raise ShardmakeError(
            f"The model needs {format_bytes(bundle.size)}, and {folder} has {format_bytes(room.free)} left "
            f"({room.limit}). "
            "Free some space or choose another folder in push.to, and push again."
        )


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}.{what}")


def _settle_leftovers(target: Path) -> None:
    """Settle what pushes from this machine left when they were killed: the old model goes back, half copies go."""
    for path in sorted(target.parent.glob(f".{target.name}.{os.uname().nodename}.*")):
        process, what = path.name.split(".")[-2:]
        if Path("/proc", process).exists():
            continue
        if what == "retired" and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path)
