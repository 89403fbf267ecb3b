"""Data that a user's script reads by itself (``data.format: raw``): hashed, and handed over as a folder.

The folder has the files of the source under their own names, as links, and nothing else. A single file is alone in it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmake.config.formats import raw_files
from shardmake.core.errors import DataError
from shardmake.core.run_folder import make_folder, make_link
from shardmake.data.sources import file_record
from shardmake.run.paths import RunDir
from shardmake.run.receipts import DataReceipt


def identity_of_raw(source: Path) -> dict[str, Any]:
    """Return name, size and checksum of every file of ``source``, a file or a folder.

    Raises `DataError` if there is none.
    """
    return {"files": [file_record(path, _root(source)) for path in files_of_raw(source)]}


def files_of_raw(source: Path) -> list[Path]:
    """Return every file of ``source``; raise `DataError` if there is none."""
    files = raw_files(source)
    if not files:
        raise DataError(f"No data in {source}: the folder has no file. Name a file, or a folder with files.")
    return files


def link_raw(source: Path, identity: Mapping[str, Any], folder: Path) -> None:
    """Create ``folder`` with a link to each file of ``source`` that ``identity`` names."""
    root = _root(source).resolve()
    for file in identity["files"]:
        link = folder / file["path"]
        make_folder(link.parent)
        make_link(link, root / file["path"])


def are_linked(source: Path, identity: Mapping[str, Any], folder: Path) -> bool:
    """Return whether `link_raw` has made ``folder`` from the files of ``source``."""
    root = _root(source)
    return all((folder / file["path"]).resolve() == (root / file["path"]).resolve() for file in identity["files"])


def check_raw(rundir: RunDir) -> None:
    """Raise `DataError` if a file of the raw data has another size than when it was hashed."""
    for file in DataReceipt.read(rundir.data_receipt).sources["train"]["files"]:
        path = rundir.raw_data / file["path"]
        size = path.stat().st_size if path.exists() else None
        if size != file["bytes"]:
            found = "is missing" if size is None else f"has {size:,} bytes instead of {file['bytes']:,}"
            raise DataError(
                f"Training was not started: {os.path.realpath(path)} {found}, and other data than the run's would be "
                f"learned. Restore it, or hash the data again: shardmake data {rundir.name}"
            )


def _root(source: Path) -> Path:
    return source if source.is_dir() else source.parent
