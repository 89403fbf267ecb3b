"""Sources of examples: JSONL or Parquet files, a folder of them, or a hub data set.

`read` returns a `datasets.Dataset` on disk for any source, and `example_in` converts one of its rows into the original
example. JSON lines stay bytes until then, so Arrow needs no common type for all of them, and a broken line is reported
by its number.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.config.models import Data
from shardmake.core.atomic import sha256
from shardmake.core.errors import DataError, ShardmakeError, nearest

if TYPE_CHECKING:
    import datasets

TRAIN_SPLITS = ("train",)
EVAL_SPLITS = ("validation", "test", "eval", "dev")
_SUFFIXES = (".jsonl", ".parquet")
_HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(:(?P<split>[\w.-]+))?")
_LINE, _PLACE, _NUMBER = "__line__", "__place__", "__number__"


@dataclass(frozen=True)
class Files:
    """Local files of one kind, in reading order."""

    paths: tuple[Path, ...]

    @property
    def are_jsonl(self) -> bool:
        """Return True for JSON lines, False for Parquet."""
        return self.paths[0].suffix == ".jsonl"

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
    if match is None or path.suffix in (*_SUFFIXES, ".json", ".csv", ".txt"):
        raise DataError(
            f"Data not found: {name!r} does not exist (working directory: {Path.cwd()}). Name a .jsonl or "
            ".parquet file, a folder of such "
            "files, or a hub data set (org/name)."
        )
    chosen = (match["split"],) if match["split"] else splits
    return HubDataset(match["repository"], data.subset, data.revision, chosen)


def _one_file(path: Path) -> Files:
    if path.suffix not in _SUFFIXES:
        raise DataError(f"Unsupported data file: {path}. Use .jsonl (one JSON object per line) or .parquet.")
    return Files((path,))


def _files_in(folder: Path) -> Files:
    by_suffix = {suffix: sorted(folder.rglob(f"*{suffix}")) for suffix in _SUFFIXES}
    found = [paths for paths in by_suffix.values() if paths]
    if not found:
        raise DataError(f"No data in {folder}: it has no .jsonl and no .parquet file. Name a folder with one of them.")
    if len(found) > 1:
        raise DataError(
            f"Ambiguous data folder: {folder} has both .jsonl and .parquet files. Keep one kind in a folder."
        )
    return Files(tuple(found[0]))


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

    Raises `DataError` for a file that is not Parquet, a hub data set that cannot be loaded, and an empty source.
    """
    if isinstance(source, HubDataset):
        return _numbered(source, read_hub(source))
    return _read_jsonl(source, cache) if source.are_jsonl else _numbered(source, _read_parquet(source, cache))


def check(source: Source) -> None:
    """Raise `DataError` with file and line for local files that cannot be read; ignore hub data sets."""
    if isinstance(source, Files) and source.are_jsonl:
        for row in _json_lines([str(path) for path in source.paths]):
            example_in(row)
    elif isinstance(source, Files):
        _check_parquet(source.paths)


def first_rows(source: Source, limit: int) -> Iterator[Mapping[str, Any]]:
    """Yield the first ``limit`` rows of ``source`` as `read` returns them, without reading the rest of a file."""
    if isinstance(source, HubDataset):
        yield from islice(_numbered(source, read_hub(source)), limit)
    elif source.are_jsonl:
        yield from islice(_json_lines([str(path) for path in source.paths]), limit)
    else:
        _check_parquet(source.paths)
        yield from islice(_parquet_rows(source.paths, limit), limit)


def _parquet_rows(paths: tuple[Path, ...], batch_size: int) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    number = 0
    for path in paths:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size):
                for row in batch.to_pylist():
                    number += 1
                    yield {**row, _NUMBER: number}


def _read_jsonl(source: Files, cache: Path) -> "datasets.Dataset":
    import datasets

    paths = [str(path) for path in source.paths]
    if not any(_json_lines(paths)):
        raise DataError(f"No examples in {source}. Name a source with data.")
    features = datasets.Features({_PLACE: datasets.Value("string"), _LINE: datasets.Value("binary")})
    return datasets.Dataset.from_generator(
        _json_lines, features=features, cache_dir=str(cache), gen_kwargs={"paths": paths}
    )


def _read_parquet(source: Files, cache: Path) -> "datasets.Dataset":
    import datasets

    _check_parquet(source.paths)
    return datasets.Dataset.from_parquet([str(path) for path in source.paths], cache_dir=str(cache))


def _numbered(source: Source, rows: "datasets.Dataset") -> "datasets.Dataset":
    """Add row numbers, which stay with the rows when they are selected or shuffled."""
    import numpy as np

    if not len(rows):
        raise DataError(f"No examples in {source}. Name a source with data.")
    return rows.add_column(_NUMBER, np.arange(1, len(rows) + 1))


def _json_lines(paths: list[str]) -> Iterator[dict[str, Any]]:
    for path in paths:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield {_PLACE: f"{path}, line {number}", _LINE: line}


def _check_parquet(paths: tuple[Path, ...]) -> None:
    """Raise `DataError` for files that are not Parquet or have other columns than the first."""
    import pyarrow
    import pyarrow.parquet

    schemas = {}
    for path in paths:
        try:
            schemas[path] = pyarrow.parquet.read_schema(path).names
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{path} is not a Parquet file: {error}. Write it again, or name another file.") from None
    for path, names in schemas.items():
        if set(names) != set(schemas[paths[0]]):
            other = ", ".join(schemas[paths[0]])
            raise DataError(
                f"Columns differ: {path} has {', '.join(names)}; {paths[0]} has {other}. Use the same columns in "
                "all files."
            )


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
    """Turn errors of a hub data set into `DataError` with advice."""
    try:
        yield
    except ShardmakeError:
        raise
    except ValueError as error:
        raise DataError(f"Cannot load hub data set {source}: {_subset_mistake(source) or error}") from None
    except OSError as error:
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


def place_of(row: Mapping[str, Any]) -> str:
    """Return the place of a row for messages: file and line, or the row's number counted from 1."""
    return row[_PLACE] if _PLACE in row else f"row {row[_NUMBER]}"


def example_in(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the example in one row of `read`; raise `DataError` with file and line if it is not a JSON object.

    Arrow represents a key that only other rows have as None; such keys are removed, as in the file.
    """
    if _LINE not in row:
        return _without_nones({key: value for key, value in row.items() if key != _NUMBER})
    try:
        example = json.loads(row[_LINE])
    except ValueError as error:
        raise DataError(f"{place_of(row)} is not valid JSON: {error}") from None
    if not isinstance(example, dict):
        raise DataError(f"{place_of(row)} is not a JSON object but {type(example).__name__}.")
    return example


def _without_nones(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nones(item) for key, item in value.items() if item is not None}
    return [_without_nones(item) for item in value] if isinstance(value, list) else value
