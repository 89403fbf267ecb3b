"""The disk space that a run will need, compared with the free space of the file system and the user's quota."""

import logging
import time
from typing import Final

from shardmake.core.disk import require_space, tree_size
from shardmake.core.units import format_bytes
from shardmake.run.paths import RunDir
from shardmake.run.plan import Choice, MemoryEstimates, Plan

logger = logging.getLogger(__name__)
_DAY: Final = 86400


def warn_of_purge(rundir: RunDir, days: int | None) -> None:
    """Log a warning from a week before the site removes the run's oldest file, ``days`` after its last change."""
    changed = [path.lstat().st_mtime for path in rundir.root.rglob("*") if path.is_file()] if days else []
    if days and changed and (age := (time.time() - min(changed)) / _DAY) > days - 7:
        logger.warning(
            "%s has files that were last changed %d days ago, and the site removes them after %d (purge_days). Copy "
            "the folder to storage that is not purged (cp -a keeps the times), or push the model.",
            *(rundir.root, age, days),
        )


def check_run(rundir: RunDir) -> None:
    """Fail if the checkpoints and the final model of the run's plan will not fit on disk."""
    check_choice(rundir, MemoryEstimates.read(rundir.memory), Plan.read(rundir.plan).choice)


def check_choice(rundir: RunDir, estimates: MemoryEstimates, choice: Choice) -> str:
    """Fail if the checkpoints and the final model of ``choice`` will not fit on disk.

    Files that exist already count as available. Return a sentence with the bytes needed and the bytes left.
    """
    terms = estimates.of(choice).disk.terms
    needed = max(0, sum(terms.values()) - tree_size(rundir.checkpoints) - tree_size(rundir.model))
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in terms.items())
    return require_space(rundir.root, needed, f"Run {rundir.name} will need {format_bytes(needed)} more ({listed})")


def checkpoint_size(rundir: RunDir, copies: int) -> int:
    """Return the estimated bytes of one checkpoint of the run's plan.

    The estimate holds ``copies`` checkpoints and the one that is being written.
    """
    choice = Plan.read(rundir.plan).choice
    return MemoryEstimates.read(rundir.memory).of(choice).disk.terms["checkpoints"] // (copies + 1)
