"""Set aside what a run left under other settings, and restore it when the run has those settings again."""

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

from shardmake.core.run_folder import rename

logger = logging.getLogger(__name__)


def stash_and_restore(folder: Path, theirs: str, ours: str, changes: str) -> None:
    """Rename ``folder``, which has the settings digest ``theirs``, and restore an earlier one with ``ours``.

    ``changes`` names the settings that differ, for the message.
    """
    aside = next(place for place in _places(folder, theirs) if not place.exists())
    logger.info("The folder %s belongs to other settings (%s). Renamed it to %s.", folder.name, changes, aside.name)
    rename(folder, aside)
    own = next(_places(folder, ours))
    if own.exists():
        logger.info("Restoring %s, which belongs to the current settings.", own.name)
        rename(own, folder)


def _places(folder: Path, settings_digest: str) -> Iterator[Path]:
    """Yield the names for a folder that is set aside, in order."""
    yield folder.with_name(f"{folder.name}-of-{settings_digest}")
    for number in itertools.count(2):
        yield folder.with_name(f"{folder.name}-of-{settings_digest}-{number}")
