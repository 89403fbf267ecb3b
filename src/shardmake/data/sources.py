"""Sources of examples: a local file, or the files of one split in a folder.

Data sets of the hub become local files first (`shardmake.fetch.hub_data`). Data that a user's script reads by itself
(``data.format: raw``) are hashed, and handed over as a folder of links to the files of the source.
"""

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from shardmake.config.formats import COMPRESSION_SUFFIXES, DATA_SUFFIXES, data_files, data_kind, raw_files
from shardmake.config.models import Data
from shardmake.core.atomic import sha256
from shardmake.core.errors import DataError
from shardmake.core.run_folder import make_folder, make_link
from shardmake.data.files import Row, count_parquet_rows, open_row, raw_rows

FIRST_ROWS = 64
TRAIN_SPLITS = ("train",)
EVAL_SPLITS = ("validation", "test", "eval", "dev")
FILE_KINDS = (
    f"{', '.join(DATA_SUFFIXES)}, compressed with {', '.join(COMPRESSION_SUFFIXES)} except for .parquet and .arrow"
)
ONE_SPLIT: Final = ".source.json"
"""A folder with this file was fetched from the hub and has the files of one split, whatever their names."""
_NO_EXAMPLES: Final = "No examples in {}. Name a source with data."
_HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(:(?P<split>[\w.-]+))?")


@dataclass(frozen=True)
class Source:
    """Local files of one kind, in reading order."""

    paths: tuple[Path, ...]
    unused: tuple[Path, ...] = ()
    """Data files beside them that belong to other splits."""

    def __str__(self) -> str:
        if len(self.paths) == 1 and not self.unused:
            return str(self.paths[0])
        folder = Path(os.path.commonpath([path.parent for path in (*self.paths, *self.unused)]))
        used = _names(self.paths, folder) if len(self.paths) == 1 else f"{len(self.paths)} files"
        return f"{folder} ({used}{'; not used: ' if self.unused else ''}{_names(self.unused, folder)})"


@dataclass(frozen=True)
class HubDataset:
    """A data set on the Hugging Face hub; the first existing one of ``splits`` is meant."""

    repository: str
    subset: str | None
    revision: str | None
    splits: tuple[str, ...]

    def __str__(self) -> str:
        return self.repository


def locate(name: str, data: Data, splits: tuple[str, ...]) -> Source:
    """Return the files of a source on this machine; of a folder, those of the first of ``splits`` that it has.

    Raises `DataError` for a missing path, for files of an unsupported kind, and for a hub data set that is not here.
    """
    found = locate_named(name, data, splits)
    if isinstance(found, HubDataset):
        raise DataError(
            f"Data not found: {name!r} does not exist (working directory: {Path.cwd()}). If it is a data set of the "
            "hub, fetch it first: shardmake fetch NAME"
        )
    return found


def locate_named(name: str, data: Data, splits: tuple[str, ...]) -> Source | HubDataset:
    """Resolve ``name`` as `locate`, or to a hub data set (`org/name` or `org/name:split`), without a request.

    ``data`` has subset and revision of a hub data set; ``splits`` are tried in order if ``name`` has no split.
    """
    path = Path(name)
    if path.is_dir():
        return _files_in(path, data, splits)
    if path.is_file():
        if data_kind(path.name):
            return Source((path,))
        why = " A text file does not state where an example ends." if ".txt" in path.suffixes else ""
        raise DataError(f"Unsupported data file: {path}.{why} Use {FILE_KINDS}.")
    match = _HUB_NAME.fullmatch(name)
    if match is None or data_kind(name) or path.suffix == ".txt":
        raise DataError(
            f"Data not found: {name!r} does not exist (working directory: {Path.cwd()}). Name a file, a folder of "
            "files, or a hub data set (org/name)."
        )
    chosen = (match["split"],) if match["split"] else splits
    return HubDataset(match["repository"], data.subset, data.revision, chosen)


def _files_in(folder: Path, data: Data, splits: tuple[str, ...]) -> Source:
    """Return the data files below ``folder``, without hidden ones and those that describe a data set."""
    found = data_files(folder)
    kinds = sorted({data_kind(path.name) or "" for path in found})
    if not kinds:
        raise DataError(f"No data in {folder}: it has no file with examples. Use {FILE_KINDS}.")
    if len(kinds) > 1:
        raise DataError(
            f"Ambiguous data folder: {folder} has both {' and '.join(kinds)} files. Keep one kind in a "
            "folder, or name a file."
        )
    if (folder / ONE_SPLIT).exists():
        return Source(tuple(found))
    named = _by_split(folder, found, data.subset)
    usable = [named[split] for split in splits if split in named]
    chosen = next(iter([*usable, *(files for files in named.values() if len(files) == len(found))]), None)
    if chosen is None:
        raise DataError(
            f"Data folder {folder} has no split {' or '.join(splits)}. By the hub's rules for names, "
            f"{'; '.join(f'{split} is {_names(files, folder)}' for split, files in named.items()) or 'it has none'}. "
            "Name a file, or rename the files."
        )
    used = set(chosen)
    return Source(tuple(chosen), tuple(path for path in found if path not in used))


def _by_split(folder: Path, found: Sequence[Path], subset: str | None) -> dict[str, list[Path]]:
    """Return the data files of each split by the hub's rules, which are about names and what README.md states.

    `datasets` is asked about empty files with the names of ``found``, so other files in the folder have no effect.
    """
    import datasets

    with TemporaryDirectory() as copy:
        for path in found:
            Path(copy, path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            Path(copy, path.relative_to(folder)).touch()
        with suppress(FileNotFoundError):
            shutil.copyfile(folder / "README.md", Path(copy, "README.md"))
        described = Path(copy, "README.md").exists()
        where = {"path": copy, "name": subset} if described else {"path": "json", "data_dir": copy}
        try:
            files = datasets.load_dataset_builder(**where).config.data_files
        except (ValueError, FileNotFoundError) as error:
            problem = str(error).partition("Example of usage")[0].replace(copy, str(folder))
            raise DataError(
                f"Cannot read data folder {folder}: {' '.join(problem.split())} Name a file, or set data.subset."
            ) from None
    return {str(split): [folder / Path(name).relative_to(copy) for name in names] for split, names in files.items()}


def _names(paths: Sequence[Path], folder: Path) -> str:
    """Return the names of the first ``paths`` below ``folder``, and how many there are besides."""
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(str(path.relative_to(folder)) for path in paths[:3]) + more


def identity(paths: Iterable[Path], root: Path = Path()) -> dict[str, Any]:
    """Return what identifies the content of files: their names (below ``root``), sizes and checksums."""
    return {"files": [file_record(path, root) for path in paths]}


def file_record(path: Path, root: Path = Path()) -> dict[str, Any]:
    """Return name (below ``root``), size and checksum of a file."""
    name = path.relative_to(root) if path.is_relative_to(root) else path
    return {"path": str(name), "bytes": path.stat().st_size, "sha256": sha256(path)}


def count_rows(source: Source) -> int:
    """Return the number of rows; raise `DataError` for a file that cannot be read and for an empty source."""
    if data_kind(source.paths[0].name) == ".parquet":
        count = sum(map(count_parquet_rows, source.paths))
    else:
        count = sum(1 for _ in raw_rows(source.paths))
    if not count:
        raise DataError(_NO_EXAMPLES.format(source))
    return count


def first_rows(source: Source, limit: int = FIRST_ROWS, *, drop: bool = False) -> list[Row]:
    """Return the first ``limit`` rows of ``source`` without reading the rest, and with ``drop`` only readable ones.

    Raises `DataError` if there is none.
    """
    found, error = list[Row](), DataError(_NO_EXAMPLES.format(source))
    for raw in raw_rows(source.paths):
        try:
            found.append(open_row(raw))
        except DataError as unreadable:
            error = unreadable
            if not drop:
                raise
        if len(found) == limit:
            break
    if not found:
        raise error
    return found


def files_of_raw(source: Path) -> list[Path]:
    """Return every file of ``source``, which a user's script reads; raise `DataError` if there is none."""
    if not (files := raw_files(source)):
        raise DataError(f"No data in {source}: the folder has no file. Name a file, or a folder with files.")
    return files


def identity_of_raw(source: Path) -> dict[str, Any]:
    """Return name, size and checksum of every file of ``source``, as `files_of_raw` finds them."""
    return identity(files_of_raw(source), _root(source))


def link_raw(source: Path, identity: Mapping[str, Any], folder: Path) -> None:
    """Create ``folder`` with a link to each file of ``source`` that ``identity`` names."""
    for link, target in _links(source, identity, folder):
        make_folder(link.parent)
        make_link(link, target)


def are_linked(source: Path, identity: Mapping[str, Any], folder: Path) -> bool:
    """Return whether `link_raw` has made ``folder`` from the files of ``source``."""
    return all(link.resolve() == target.resolve() for link, target in _links(source, identity, folder))


def _links(source: Path, identity: Mapping[str, Any], folder: Path) -> list[tuple[Path, Path]]:
    root = _root(source).resolve()
    return [(folder / file["path"], root / file["path"]) for file in identity["files"]]


def _root(source: Path) -> Path:
    return source if source.is_dir() else source.parent
