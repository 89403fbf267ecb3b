"""The staging folder in which a merged model is written: locked, removed on errors, renamed when it is complete."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from shardmake.consolidate.layout import PlannedShard
from shardmake.core.disk import require_space
from shardmake.core.errors import CheckpointError
from shardmake.core.run_folder import (
    fsync_directory,
    make_folder,
    open_file,
    real_path,
    remove,
    rename,
    replace,
    unlink,
)
from shardmake.core.units import format_bytes

logger = logging.getLogger(__name__)


def check_space(shards: list[PlannedShard], staging: Path) -> None:
    """Raise `DiskFullError` if the files still to be written do not fit into the file system or a quota."""
    files = [staging / name for shard in shards for name in (shard.name, f".{shard.name}.tmp")]
    present = sum(path.stat().st_blocks * 512 for path in files if path.is_file())
    needed = sum(shard.size for shard in shards) - present
    advice = "Free some space, choose another folder, or use --dtype bf16."
    require_space(staging.parent, needed, f"The merged model needs {format_bytes(needed)}", advice, len(files))


def remove_others(shards: list[PlannedShard], staging: Path, *keep: str) -> None:
    """Remove files of an interrupted merge that do not belong to this one."""
    names = {name for shard in shards for name in (shard.name, f".{shard.name}.done")} | {".lock", *keep}
    for path in staging.iterdir():
        if path.name not in names:
            remove(path)


class StagingLock:
    """Excludes a second merge into the same folder; the tasks of one merge share the lock until the last one ends."""

    def __init__(self, staging: Path, task: tuple[int, int]) -> None:
        self._staging, self._task = staging, task

    def __enter__(self) -> "StagingLock":
        make_folder(self._staging)
        index, count = self._task
        with ExitStack() as opened:
            self._file = opened.enter_context(open_file(self._staging / ".lock", "w"))
            self._acquire(self._file, fcntl.LOCK_EX if count == 1 else fcntl.LOCK_SH)
            if count > 1:
                self._acquire(opened.enter_context(open_file(self._staging / f".task-{index}", "w")), fcntl.LOCK_EX)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if self._exists() and all(path.name.startswith((".lock", ".task-")) for path in self._staging.iterdir()):
            remove(self._staging)
        self._opened.close()

    def _acquire(self, file: IO[str], kind: int) -> None:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"Another merge is writing to {self._staging}. Wait until it has finished, or stop it."
            ) from None

    def is_last(self) -> bool:
        """Wait for the other tasks; return True if none of them has finished the merge in the meantime."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return self._exists()

    def _exists(self) -> bool:
        """Return True if the folder is still the one that was locked."""
        path = self._staging / ".lock"
        return path.is_file() and os.path.samestat(path.stat(), os.fstat(self._file.fileno()))


@contextmanager
def discard_on_error(staging: Path) -> Iterator[None]:
    """Remove the staging folder after an error; a killed merge leaves it, and the next merge resumes there."""
    try:
        yield
    except OSError as error:
        remove(staging)
        raise CheckpointError(
            f"Writing to {staging} failed: {error}. No output was left behind. Fix the problem and run the command "
            "again."
        ) from error
    except KeyboardInterrupt:
        logger.warning("Interrupted. %s holds the finished files; the same command resumes there.", staging)
        raise
    except Exception:
        remove(staging)
        raise


def replace_folder(staging: Path, out: Path) -> None:
    """Replace ``out`` by the complete staging folder; readers see the old folder or the new one, never a mix."""
    out = real_path(out)
    unlink(staging / ".lock")
    for path in staging.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    fsync_directory(staging)
    replace(staging, out, _replaced_folder(out))
    remove(staging)
    remove(_replaced_folder(out))


def recover_replaced(out: Path) -> None:
    """Finish what a merge that was killed between the two renames of `replace_folder` left beside ``out``."""
    out = real_path(out)
    old = _replaced_folder(out)
    if old.is_dir() and not out.exists():
        rename(old, out)
    remove(old)


def _replaced_folder(out: Path) -> Path:
    """Return the name that the previous ``out`` has for a moment on a file system that cannot swap two folders."""
    return out.parent / f".{out.name}.replaced"
