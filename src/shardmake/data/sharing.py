"""Share tokenized data between runs: a run takes the files of another run that were made from the same content.

The files are linked, or copied where links are impossible, so each run has all of its files and can be removed alone. A
lock lets the runs of a sweep tokenize their data once although their jobs start together.
"""

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardmake.core.atomic import sha256
from shardmake.core.errors import ShardmakeError
from shardmake.core.run_folder import make_folder, open_file, remove
from shardmake.run.paths import RunDir
from shardmake.run.receipts import DataReceipt

ENCODING = 3
"""Version of the rules that make tokens of an example: one more for each change of them."""
logger = logging.getLogger(__name__)


def content_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``inputs`` of a data receipt without the folders of the source files."""
    sources = {
        split: {**source, "files": [{**file, "path": Path(file["path"]).name} for file in source["files"]]}
        for split, source in inputs["sources"].items()
        if "files" in source
    }
    return {**inputs, "sources": {**inputs["sources"], **sources}}


@contextlib.contextmanager
def locked(runs: Path, name: str) -> Iterator[None]:
    """Hold the lock ``name`` of a folder of runs; on a file system without locks, warn and hold none."""
    path = runs / ".locks" / name
    with contextlib.ExitStack() as opened:
        try:
            make_folder(path.parent)
            file = opened.enter_context(open_file(path, "a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("Another run prepares the same data. Waiting for it.")
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("Cannot lock %s: %s. Each run prepares its own data.", path, error.strerror)
        yield


def take_same_data(rundir: RunDir, inputs: Mapping[str, Any], work: Path) -> DataReceipt | None:
    """Put the splits of another run with the same content into ``work``, and return their receipt for this run.

    Return None if no run has them, or if their files are not those of their receipt.
    """
    wanted = content_of(inputs)
    for path in sorted(rundir.root.parent.glob("*/data/receipt.json")):
        if path == rundir.data_receipt:
            continue
        with contextlib.suppress(ShardmakeError, OSError):  # removed or renewed at this moment, or of another version
            receipt = DataReceipt.read(path)
            found = receipt.model_dump(include=set(inputs), mode="json")
            is_same = receipt.encoding == ENCODING and content_of(found) == wanted
            if is_same and _take_splits(path.parent, receipt, work):
                logger.info("Took the data of %s, which has the same content.", path.parents[1].name)
                return DataReceipt(**(receipt.model_dump() | dict(inputs)))
    return None


def _take_splits(folder: Path, receipt: DataReceipt, work: Path) -> bool:
    for split in ("train", "eval"):
        remove(work / split)
        shutil.copytree(folder / split, work / split, copy_function=link_or_copy)
    return all(sha256(work / file.path) == file.sha256 for part in (receipt.train, receipt.eval) for file in part.files)


def link_or_copy(source: str, target: str) -> None:
    """Make ``target`` a hard link to ``source``, or a copy where that is impossible."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or a file of another user
        shutil.copy2(source, target)
