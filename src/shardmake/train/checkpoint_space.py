"""Disk space for the next checkpoint: how much it needs, what may be removed, and the error of a full disk."""

import errno
import logging
from dataclasses import dataclass
from pathlib import Path

from shardmake.checkpoint import store
from shardmake.checkpoint.record import CheckpointRecord, find_problems
from shardmake.checkpoint.retention import Retention
from shardmake.core import disk
from shardmake.core.errors import DiskFullError, ShardmakeError
from shardmake.core.units import MIB, format_bytes

logger = logging.getLogger(__name__)
MARGIN = 64 * MIB
"""Bytes that stay free beside a checkpoint, because its parts differ slightly in size."""


@dataclass(frozen=True)
class CheckpointSpace:
    """The space of a run's checkpoint folder; `Saver` explains the fields."""

    folder: Path
    retention: Retention
    expected_bytes: int

    def newest(self) -> tuple[CheckpointRecord, Path] | None:
        """Return the newest committed checkpoint."""
        return next(store.committed(self.folder), None)

    def needed(self) -> int:
        """Return the expected size of the next checkpoint."""
        newest = self.newest()
        return newest[0].size if newest else self.expected_bytes

    def make(self, needed: int) -> str:
        """Remove what may be removed until ``needed`` bytes fit; return an error message if they do not."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for free_space in (lambda: None, self._remove_damaged, self._remove_older):
            free_space()
            if needed <= disk.free_space(self.folder).free:
                return ""
        try:
            disk.check_save(self.folder, needed)
        except ShardmakeError as error:
            return str(error)
        return ""

    def _remove_damaged(self) -> None:
        for path in store.damaged(self.folder):
            logger.info("Removing %s to make room for the next checkpoint.", path.name)
            store.remove(path)

    def _remove_older(self) -> None:
        """Keep only the newest checkpoint (and the best), after verifying every byte of the newest."""
        newest = self.newest()
        if newest and not find_problems(newest[1]):
            for path in store.prune(self.folder, self.retention.minimal()):
                logger.info("Removed %s to make room for the next checkpoint.", path.name)

    def full_disk_error(self, error: BaseException, written: Path) -> DiskFullError | None:
        """Return the error to raise if ``error`` comes from a full disk below ``written``, else None.

        The error number is not always available: torch reports an "unexpected pos" on a full disk.
        """
        folder = self.folder if written.is_relative_to(self.folder) else written.parent
        space = disk.free_space(folder)
        full = any(getattr(it, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for it in (error, error.__cause__))
        if isinstance(error, ShardmakeError | KeyboardInterrupt | SystemExit) or not (full or space.free < MARGIN):
            return None
        newest = self.newest()
        resume = f"resumes from {newest[1].name}" if newest else "starts again from the base model"
        return DiskFullError(
            f"The disk filled up while {written.name} was written: {folder} has {format_bytes(space.free)} left "
            f"({space.limit}). Free some space (`shardmake clean` lists what can be removed) and run the same command "
            f"again. It {resume}."
        )
