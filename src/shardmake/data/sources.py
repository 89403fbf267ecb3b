"""Sources of examples: local files, a folder of them, or a hub data set.

`read` returns a memory-mapped `datasets.Dataset` for any source, and `open_row` converts one of its rows into the
original example with its place. Rows of text files stay the bytes of one JSON object until then
(`shardmake.data.files`), so Arrow needs no common type for all of them. Parquet files and hub data sets are read by
`datasets` itself.
"""

import bisect
import errno
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardmake.config.formats import COMPRESSION_SUFFIXES, DATA_SUFFIXES, data_files, data_kind
from shardmake.config.models import Data
from shardmake.core.atomic import sha256
from shardmake.core.errors import DataError, ShardmakeError, nearest
from shardmake.data.files import LINE, PLACE, text_rows
from shardmake.data.parquet import filled_parts, last_numbers, parquet_rows, unreadable

if TYPE_CHECKING:
    import datasets

FIRST_ROWS = 64
TRAIN_SPLITS = ("train",)
EVAL_SPLITS = ("validation", "test", "eval", "dev")
FILE_KINDS = f"{', '.join(DATA_SUFFIXES)}, compressed with {', '.join(COMPRESSION_SUFFIXES)} except for .parquet"
_HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(:(?P<split>[\w.-]+))?")
_NUMBER = "__number__"


@dataclass(frozen=True)
class Files:
    """Local files of one kind, in reading order."""

    paths: tuple[Path, ...]

    @property
    def are_text(self) -> bool:
        """Return False for Parquet, True for all other kinds."""
        return data_kind(self.paths[0].name) != ".parquet"

    def __str__(self) -> str:
        return str(self.paths[0]) if len(self.paths) == 1 else f"{self.paths[0].parent} ({len(self.paths)} files)"


@dataclass(frozen=True)
class HubDataset:
    """A data set on the Hugging Face hub; the first existing one of ``splits`` is read."""

    repository: str
    subset: str | None
    revision: str | None
    splits: tuple[str, ...]

    def __str__(self) -> str:
        return self.repository


Source = Files | HubDataset


class Row(NamedTuple):
    """One example of a source."""

    place: str
    """Its place for messages: the file with the line, or with the row counted from 1."""
    columns: list[str]
    """All columns, also those without a value in this row."""
    example: Mapping[str, Any]


def locate(name: str, data: Data, splits: tuple[str, ...]) -> Source:
    """Resolve ``name`` to a file, a folder of files, or a hub data set (`org/name` or `org/name:split`).

    ``data`` has subset and revision of a hub data set; ``splits`` are tried in order if ``name`` has no split. Raises
    `DataError` for a missing path and for files of an unsupported kind.
    """
    path = Path(name)
    if path.is_dir():
        return _files_in(path)
    if path.is_file():
        return _one_file(path)
    match = _HUB_NAME.fullmatch(name)
    if match is None or data_kind(name) or path.suffix == ".txt":
        raise DataError(
            f"Data not found: {name!r} does not exist (working directory: {Path.cwd()}). Name a file, a folder of "
            "files, or a hub data set (org/name)."
        )
    chosen = (match["split"],) if match["split"] else splits
    return HubDataset(match["repository"], data.subset, data.revision, chosen)


def _one_file(path: Path) -> Files:
    if data_kind(path.name) is None:
        why = " A text file does not state where an example ends." if ".txt" in path.suffixes else ""
        raise DataError(f"Unsupported data file: {path}.{why} Use {FILE_KINDS}.")
    return Files((path,))


def _files_in(folder: Path) -> Files:
    """Return the data files below ``folder``, without hidden ones and those that describe a data set."""
    by_kind: dict[str, list[Path]] = {}
    for path in data_files(folder):
        by_kind.setdefault(data_kind(path.name) or "", []).append(path)
    if not by_kind:
        raise DataError(f"No data in {folder}: it has no file with examples. Use {FILE_KINDS}.")
    if len(by_kind) > 1:
        raise DataError(
            f"Ambiguous data folder: {folder} has both {' and '.join(sorted(by_kind))} files. Keep one kind in a "
            "folder, or name a file."
        )
    return Files(tuple(*by_kind.values()))


def identity(source: Source) -> dict[str, Any]:
    """Return what identifies the content of ``source``: checksums of files, or the commit of a hub data set."""
    if isinstance(source, Files):
        return {"files": [file_record(path) for path in source.paths]}
    import datasets

    with _hub_errors(source):
        builder = datasets.load_dataset_builder(source.repository, source.subset, revision=source.revision)
    return {
        "hub": source.repository,
        "subset": source.subset,
        "commit": builder.hash,
        "splits": list(source.splits),
    }


def file_record(path: Path, root: Path = Path()) -> dict[str, Any]:
    """Return name (below ``root``), size and checksum of a file."""
    name = path.relative_to(root) if path.is_relative_to(root) else path
    return {"path": str(name), "bytes": path.stat().st_size, "sha256": sha256(path)}


def read(source: Source, cache: Path) -> "datasets.Dataset":
    """Return all rows of ``source``, memory-mapped from ``cache`` or from the hub's own cache.

    Raises `DataError` for a file that cannot be read, a hub data set that cannot be loaded, and an empty source.
    """
    if isinstance(source, HubDataset):
        return _numbered(source, read_hub(source))
    with _generation_errors(source):
        return _read_text(source, cache) if source.are_text else _numbered(source, _read_parquet(source, cache))


@contextmanager
def _generation_errors(source: Files) -> Iterator[None]:
    """Raise what happened instead of the exception in which `datasets` wraps it."""
    import datasets

    try:
        yield
    except datasets.exceptions.DatasetGenerationError as error:
        raise _cause(error, source) from None


def _cause(error: BaseException, source: Source) -> BaseException:
    """Return what happened while `datasets` read ``source``: our own error, or that of the file system."""
    cause = error.__cause__ or error.__context__ or error
    if isinstance(cause, ShardmakeError) or getattr(cause, "errno", None) is not None:
        return cause
    return unreadable(str(source), cause)


def text_examples(source: Source) -> Iterator[Row]:
    """Yield every example of text files; of other sources, check local files and yield nothing.

    Raises `DataError` with file and line for content that cannot be read.
    """
    if isinstance(source, Files) and source.are_text:
        yield from (open_row(row, source) for row in text_rows(_names(source)))
    elif isinstance(source, Files):
        _parquet_parts(source)


def first_rows(source: Source, limit: int) -> Iterator[Row]:
    """Yield the first ``limit`` rows of ``source`` without reading the rest of a file."""
    rows: Iterable[Mapping[str, Any]]
    if isinstance(source, HubDataset):
        rows = _numbered(source, read_hub(source))
    elif source.are_text:
        rows = text_rows(_names(source))
    else:
        _parquet_parts(source)
        found = enumerate(parquet_rows(source.paths, limit), start=1)
        rows = ({**row, _NUMBER: number} for number, row in found)
    yield from (open_row(row, source) for row in islice(rows, limit))


def _names(source: Files) -> list[str]:
    return [str(path) for path in source.paths]


def _read_text(source: Files, cache: Path) -> "datasets.Dataset":
    import datasets

    paths = _names(source)
    if not any(text_rows(paths)):
        raise no_examples(source)
    features = datasets.Features({PLACE: datasets.Value("string"), LINE: datasets.Value("binary")})
    return datasets.Dataset.from_generator(
        text_rows, features=features, cache_dir=str(cache), gen_kwargs={"paths": paths}
    )


def _read_parquet(source: Files, cache: Path) -> "datasets.Dataset":
    import datasets

    parts, features = _parquet_parts(source)
    if not parts:
        raise no_examples(source)
    return datasets.Dataset.from_parquet(parts, features=features, cache_dir=str(cache))


def _parquet_parts(source: Files) -> tuple[list[str], "datasets.Features | None"]:
    """Return the Parquet files that have rows, and the types of their columns; raise `DataError` if they differ."""
    import datasets

    parts, schema = filled_parts(source.paths)
    if schema is None:
        return [], None
    try:
        features = datasets.Features.from_arrow_schema(schema)
    except (ValueError, NotImplementedError) as error:  # a type that datasets does not have, such as a map
        raise unreadable(str(source), error) from None
    return [str(path) for path in parts], features


def _numbered(source: Source, rows: "datasets.Dataset") -> "datasets.Dataset":
    """Add row numbers, which stay with the rows when they are selected or shuffled."""
    import numpy as np

    if not len(rows):
        raise no_examples(source)
    return rows.add_column(_NUMBER, np.arange(1, len(rows) + 1))


def no_examples(source: Source) -> DataError:
    """Return the error for an empty source."""
    return DataError(f"No examples in {source}. Name a source with data.")


def read_hub(source: HubDataset) -> "datasets.Dataset":
    """Return the first existing split of ``source`` with its own columns; raise `DataError` if there is none."""
    import datasets

    with _hub_errors(source):
        existing = datasets.get_dataset_split_names(source.repository, source.subset, revision=source.revision)
        split = next((split for split in source.splits if split in existing), None)
        if split is None:
            raise DataError(
                f"Hub data set {source} has no split {' or '.join(source.splits)}, only {', '.join(existing)}. "
                f"Name one, as in {source.repository}:{existing[0]}."
            )
        return datasets.load_dataset(source.repository, source.subset, revision=source.revision, split=split)


@contextmanager
def _hub_errors(source: HubDataset) -> Iterator[None]:
    """Turn errors of a hub data set into `DataError` with advice; a full disk is not one of them."""
    import datasets

    try:
        yield
    except ShardmakeError:
        raise
    except datasets.exceptions.DatasetGenerationError as error:
        raise _cause(error, source) from None
    except ValueError as error:
        raise DataError(f"Cannot load hub data set {source}: {_subset_mistake(source) or error}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"Data not found: {str(source)!r} is not a file or folder in {Path.cwd()}, and the hub request "
            f"failed: {error}. "
            "Check the name and the network."
        ) from None


def _subset_mistake(source: HubDataset) -> str:
    """Return the problem with the subset, or an empty string."""
    import datasets

    subsets = datasets.get_dataset_config_names(source.repository, revision=source.revision)
    existing = f"Existing: {', '.join(subsets)}."
    if source.subset is None:
        return f"it has several subsets; choose one with data.subset. {existing}" if len(subsets) > 1 else ""
    suggestion = nearest(source.subset, subsets)
    return "" if source.subset in subsets else f"it has no subset {source.subset!r}.{suggestion} {existing}"


def open_row(row: Mapping[str, Any], source: Source) -> Row:
    """Return the example in one row of `read`; raise `DataError` with file and line if it is not a JSON object.

    Arrow represents a key that only other rows have as None; such keys are removed, as in the file.
    """
    if LINE in row:
        example = _parse(row[LINE], row[PLACE])
        return Row(row[PLACE], list(example), example)
    values = {key: value for key, value in row.items() if key != _NUMBER}
    return Row(_place_of(row[_NUMBER], source), list(values), _without_nones(values))


def _place_of(number: int, source: Source) -> str:
    if isinstance(source, HubDataset):
        return f"{source}, row {number}"
    ends = last_numbers(source.paths)
    file = bisect.bisect_left(ends, number)
    return f"{source.paths[file]}, row {number - (ends[file - 1] if file else 0)}"


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        example = json.loads(line, object_pairs_hook=_unique)
    except _RepeatedKeyError as error:
        raise DataError(f"{place} has the key {error.args[0]!r} twice in one object. Remove one.") from None
    except json.JSONDecodeError as error:
        where = f"at character {error.pos + 1}" if error.pos < len(error.doc.rstrip()) else "at the end of the line"
        raise DataError(f"{place} is not valid JSON: {error.msg} {where}.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not valid JSON: {error}.") from None
    if not isinstance(example, dict):
        raise DataError(f"{place} is not a JSON object but {type(example).__name__}.")
    return example


class _RepeatedKeyError(Exception):
    """A JSON object has a key twice; Python would silently take the last value."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary; raise `_RepeatedKeyError` if that loses a value."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _RepeatedKeyError(next(key for at, (key, _) in enumerate(pairs) if key in dict(pairs[:at])))
    return found


def _without_nones(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nones(item) for key, item in value.items() if item is not None}
    return [_without_nones(item) for item in value] if isinstance(value, list) else value
