"""Look at what was pushed again, before something is removed because it was pushed."""

import logging
from collections.abc import Mapping
from pathlib import Path

from shardmake.core.errors import ShardmakeError
from shardmake.core.manifest import FileRecord, differences, read_folder
from shardmake.push.object_store import missing_in_store
from shardmake.run.receipts import PushedTo

logger = logging.getLogger(__name__)


def problems_at(destination: PushedTo, files: Mapping[str, FileRecord]) -> list[str]:
    """Return one sentence per file that is missing or different at ``destination``, or why it cannot be read.

    Every byte of a folder is read. Of an object store, sizes and the list of checksums are, which a push writes last.
    The hub is not asked; a log line says that its copy was compared when it was pushed.
    """
    kind, _, place = destination.to.partition(":")
    if kind == "hub":
        logger.info("%s was compared when it was pushed (commit %s), not now.", destination.to, destination.commit)
        return []
    if kind == "file":
        return [f"{destination.to}: {problem}" for problem in _problems_of_folder(Path(place), files)]
    try:
        missing = missing_in_store(files, destination.to)
    except ShardmakeError as error:
        return [str(error)]
    logger.info("%s has all files by size and by its list of checksums; they were not read again.", destination.to)
    return [f"{destination.to}: {name} is missing or different" for name in missing]


def _problems_of_folder(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    try:
        found = read_folder(folder)
    except OSError as error:
        return [f"{error.filename} cannot be read: {error.strerror}"]
    return differences(files, found) if found else [f"the folder {folder} is missing or empty"]
