"""Push to a folder: copy, verify, exchange. Where the file system can, the name always leads to a whole model."""

import errno
import logging
import os
import re
import shutil
import time
from itertools import chain
from pathlib import Path

from shardmake.core.disk import require_space
from shardmake.core.errors import PushError
from shardmake.core.manifest import SUMS, differences, parse_sums, read_folder
from shardmake.core.run_folder import fsync_directory, replace
from shardmake.core.units import format_bytes
from shardmake.push.bundle import Bundle

logger = logging.getLogger(__name__)
_MORE_SPACE = "Free some space or choose another folder in push.to, and push again."
_ABANDONED_SECONDS = 24 * 3600
"""Age at which the copy of a push on another machine is taken for one that was killed."""


def push_to_folder(bundle: Bundle, target: Path) -> None:
    """Make ``target`` hold exactly ``bundle``; do not touch a target that already does.

    A link stays, and the folder it leads to gets the model.

    Raises `PushError` if the target has files of somebody else or cannot be written.
    """
    if target.is_symlink():
        target = target.resolve()
    try:
        _recover_leftovers(target)
        refuse_foreign(target)
        if not (target.is_dir() and read_folder(target) == bundle.manifest):
            _replace(bundle, target)
    except OSError as error:
        raise PushError(
            f"Push failed: {target} cannot be written: {error.strerror} ({error.filename}). "
            f"{_advice(error)}, or choose another one in push.to, and push again."
        ) from error


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and error.filename2:
        return "Another push wrote there at the same time: wait until it has ended"
    return "Free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Make that folder writable"


def refuse_foreign(target: Path) -> None:
    """Raise `PushError` unless an earlier push wrote every file in ``target``."""
    advice = "Choose another folder in push.to, or move this one."
    if not target.exists():
        return
    if not target.is_dir():
        raise PushError(f"Push failed: {target} is a file. {advice}")
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir()}
    sums = target / SUMS
    ours = {*parse_sums(sums.read_text()), SUMS} if sums.is_file() else set()
    if foreign := sorted(names - ours):
        raise PushError(
            f"Push failed: {target} contains files that no push of Shardmake wrote ({', '.join(foreign[:3])}"
            f"{', ...' if len(foreign) > 3 else ''}), so it was not replaced. {advice}"
        )


def _replace(bundle: Bundle, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    sentence = f"Push failed: the model needs {format_bytes(bundle.size)}"
    require_space(target.parent, bundle.size, sentence, _MORE_SPACE, len(bundle.paths))
    staging = _temporary_name(target, "pushing")
    try:
        _copy(bundle, staging)
        replace(staging, target, retired := _temporary_name(target, "retired"))
        shutil.rmtree(retired, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


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
        raise PushError(
            f"Push failed: the copy for {staging.parent} is damaged: {'; '.join(wrong)}. Check the disk and push again."
        )


def _temporary_name(target: Path, what: str) -> Path:
    """Return a hidden name beside ``target``, whose first three parts have no dots: purpose, machine, process."""
    return target.with_name(f".{what}.{_this_machine()}.{os.getpid()}.{target.name}")


def _this_machine() -> str:
    return os.uname().nodename.replace(".", "-")


def _recover_leftovers(target: Path) -> None:
    """Clean up after killed pushes: restore the old model, remove copies that no push writes any more."""
    name = re.compile(rf"\.(pushing|retired)\.([^.]+)\.(\d+)\.{re.escape(target.name)}")
    for path in sorted(target.parent.iterdir()) if target.parent.is_dir() else []:
        if not (found := name.fullmatch(path.name)):
            continue
        what, machine, process = found.groups()
        # Nothing is known about a process of another machine, but that a push writes or reads its copy all the time.
        may_run = machine != _this_machine() or Path("/proc", process).exists()
        changed = (it.lstat().st_mtime for it in chain([path], path.rglob("*")))
        if what == "retired" and not target.exists():
            path.rename(target)
        elif not (may_run and time.time() - max(changed) < _ABANDONED_SECONDS):
            logger.info("Removing %s, which a push that was killed on %s left behind.", path, machine)
            shutil.rmtree(path, ignore_errors=True)
