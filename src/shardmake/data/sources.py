"""Where examples come from: JSONL or Parquet files, a folder of them, or a hub data set.

`read` gives a `datasets.Dataset` on disk whatever the source, and `example_in` turns one of its rows into the example
as it was written. JSON lines travel as bytes until then: Arrow need not find a common type for all of them, and a
broken line is reported by its number.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.config.models import Data
from shardmake.core.atomic import sha256
from shardmake.core.errors import ShardmakeError, nearest

if TYPE_CHECKING:
    import datasets

TRAIN_SPLITS = ("train",)
EVAL_SPLITS = ("validation", "test", "eval", "dev")
_SUFFIXES = (".jsonl", ".parquet")
_HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(:(?P<split>[\w.-]+))?")
_LINE, _PLACE, _NUMBER = "__line__", "__place__", "__number__"


@dataclass(frozen=True)
class Files:
    """Local files of one kind, in the order they are read."""

    paths: tuple[Path, ...]

    @property
    def are_jsonl(self) -> bool:
        """Whether the files hold JSON lines; Parquet otherwise."""
        return self.paths[0].suffix == ".jsonl"

    def __str__(self) -> str:
        return str(self.paths[0]) if len(self.paths) == 1 else f"{self.paths[0].parent} ({len(self.paths)} files)"


@dataclass(frozen=True)
class HubDataset:
    """A data set on the Hugging Face hub, of which the first of ``splits`` that it has is read."""

    repository: str
    subset: str | None
    revision: str | None
    splits: tuple[str, ...]

    def __str__(self) -> str:
        return self.repository


Source = Files | HubDataset


def locate(name: str, data: Data, splits: tuple[str, ...]) -> Source:
    """What ``name`` stands for: a file, a folder of files, or a hub data set (`org/name` or `org/name:split`).

    ``data`` gives subset and revision of a hub data set; ``splits`` are its splits to try in order where ``name`` gives
    none. Raises `ShardmakeError` for a path that is not there and for files of a kind that cannot be read.
    """
    path = Path(name)
    if path.is_dir():
        return _files_in(path)
    if path.is_file():
        return _one_file(path)
    match = _HUB_NAME.fullmatch(name)
    if match is None or path.suffix in (*_SUFFIXES, ".json", ".csv", ".txt"):
        raise ShardmakeError(
            f"data {name!r} does not exist (now in {Path.cwd()}). Name a .jsonl or .parquet file, a folder of such "
            "files, or a hub data set (org/name)."
        )
    chosen = (match["split"],) if match["split"] else splits
    return HubDataset(match["repository"], data.subset, data.revision, chosen)


def _one_file(path: Path) -> Files:
    if path.suffix not in _SUFFIXES:
        raise ShardmakeError(
            f"{path}: files ending in {path.suffix!r} cannot be read. Use .jsonl (one JSON object a line) or .parquet."
        )
    return Files((path,))


def _files_in(folder: Path) -> Files:
    by_suffix = {suffix: sorted(folder.rglob(f"*{suffix}")) for suffix in _SUFFIXES}
    found = [paths for paths in by_suffix.values() if paths]
    if not found:
        raise ShardmakeError(f"{folder} holds no .jsonl and no .parquet file.")
    if len(found) > 1:
        raise ShardmakeError(f"{folder} holds both .jsonl and .parquet files; keep one kind in a folder.")
    return Files(tuple(found[0]))


def identity(source: Source) -> dict[str, Any]:
    """What tells one content of ``source`` from another: checksums of files, the commit of a hub data set."""
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
    """Name (below ``root``), size and checksum of a file."""
    name = path.relative_to(root) if path.is_relative_to(root) else path
    return {"path": str(name), "bytes": path.stat().st_size, "sha256": sha256(path)}


def read(source: Source, cache: Path) -> "datasets.Dataset":
    """All rows of ``source``, memory-mapped from ``cache``, or from the hub's own cache.

    Raises ShardmakeError for a file that is no Parquet, for a hub data set that cannot be had, and for no rows at all.
    """
    if isinstance(source, HubDataset):
        return _numbered(source, _read_hub(source))
    return _read_jsonl(source, cache) if source.are_jsonl else _numbered(source, _read_parquet(source, cache))


def check(source: Source) -> None:
    """Refuse local files that cannot be read to their end, naming file and line; says nothing of hub data sets."""
    if isinstance(source, Files) and source.are_jsonl:
        for row in _json_lines([str(path) for path in source.paths]):
            example_in(row)
    elif isinstance(source, Files):
        _check_parquet(source.paths)


def _read_jsonl(source: Files, cache: Path) -> "datasets.Dataset":
    import datasets

    paths = [str(path) for path in source.paths]
    if not any(_json_lines(paths)):
        raise ShardmakeError(f"{source} holds no examples.")
    features = datasets.Features({_PLACE: datasets.Value("string"), _LINE: datasets.Value("binary")})
    return datasets.Dataset.from_generator(
        _json_lines, features=features, cache_dir=str(cache), gen_kwargs={"paths": paths}
    )


def _read_parquet(source: Files, cache: Path) -> "datasets.Dataset":
    import datasets

    _check_parquet(source.paths)
    return datasets.Dataset.from_parquet([str(path) for path in source.paths], cache_dir=str(cache))


def _numbered(source: Source, rows: "datasets.Dataset") -> "datasets.Dataset":
    """Rows with their numbers, which stay theirs when rows are picked or shuffled."""
    import numpy as np

    if not len(rows):
        raise ShardmakeError(f"{source} holds no examples.")
    return rows.add_column(_NUMBER, np.arange(1, len(rows) + 1))


def _json_lines(paths: list[str]) -> Iterator[dict[str, Any]]:
    for path in paths:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield {_PLACE: f"{path}, line {number}", _LINE: line}


def _check_parquet(paths: tuple[Path, ...]) -> None:
    """Refuse files that are no Parquet, and files with other columns than the first."""
    import pyarrow
    import pyarrow.parquet

    schemas = {}
    for path in paths:
        try:
            schemas[path] = pyarrow.parquet.read_schema(path).names
        except pyarrow.ArrowInvalid as error:
            raise ShardmakeError(f"{path} is not a Parquet file: {error}") from None
    for path, names in schemas.items():
        if set(names) != set(schemas[paths[0]]):
            other = ", ".join(schemas[paths[0]])
            raise ShardmakeError(f"{path} has the columns {', '.join(names)}; {paths[0]} has {other}.")


def _read_hub(source: HubDataset) -> "datasets.Dataset":
    import datasets

    with _hub_errors(source):
        there = datasets.get_dataset_split_names(source.repository, source.subset, revision=source.revision)
        split = next((split for split in source.splits if split in there), None)
        if split is None:
            raise ShardmakeError(
                f"hub data set {source} has no split {' or '.join(source.splits)}, only {', '.join(there)}. "
                f"Name one, as in {source.repository}:{there[0]}."
            )
        return datasets.load_dataset(source.repository, source.subset, revision=source.revision, split=split)


@contextmanager
def _hub_errors(source: HubDataset) -> Iterator[None]:
    """Say what to do where the hub does not give a data set."""
    try:
        yield
    except ShardmakeError:
        raise
    except ValueError as error:
        raise ShardmakeError(f"hub data set {source}: {_subset_mistake(source) or error}") from None
    except OSError as error:
        raise ShardmakeError(
            f"data {str(source)!r} is no file or folder here ({Path.cwd()}), and the hub does not give it: {error}"
        ) from None


def _subset_mistake(source: HubDataset) -> str:
    """What is wrong with the subset, or nothing."""
    import datasets

    subsets = datasets.get_dataset_config_names(source.repository, revision=source.revision)
    there = f"There are: {', '.join(subsets)}."
    if source.subset is None:
        return f"it has several subsets; choose one with data.subset. {there}" if len(subsets) > 1 else ""
    suggestion = nearest(source.subset, subsets)
    return "" if source.subset in subsets else f"it has no subset {source.subset!r}.{suggestion} {there}"


def place_of(row: Mapping[str, Any]) -> str:
    """Where a row of `read` stands, for messages: file and line, or the row's number counted from 1."""
    return row[_PLACE] if _PLACE in row else f"row {row[_NUMBER]}"


def example_in(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The example in one row of `read`; `ShardmakeError` with file and line where it is no JSON object.

    Arrow gives a key that other rows have as None; such keys are left out, as in the file.
    """
    if _LINE not in row:
        return _without_nones({key: value for key, value in row.items() if key != _NUMBER})
    try:
        example = json.loads(row[_LINE])
    except ValueError as error:
        raise ShardmakeError(f"{place_of(row)} is not valid JSON: {error}") from None
    if not isinstance(example, dict):
        raise ShardmakeError(f"{place_of(row)} is not a JSON object but {type(example).__name__}.")
    return example


def _without_nones(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nones(item) for key, item in value.items() if item is not None}
    return [_without_nones(item) for item in value] if isinstance(value, list) else value
