"""The file ``.metadata`` of a DCP checkpoint: the boxes of every tensor, and where each box is stored."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardmake.checkpoint.formats.dtypes import FROM_TORCH
from shardmake.checkpoint.formats.pickle_objects import Inert, Name
from shardmake.checkpoint.formats.unpickle import load_plain
from shardmake.core.errors import CheckpointError

_Value = TypeVar("_Value")
Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""Offsets and sizes by dimension."""
OLDER = "Use an older checkpoint, or copy this one again."


@dataclass(frozen=True, slots=True)
class StoredBox:
    """The byte range ``[offset, offset + length)`` of a file, with the archive of one box."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor by its type, shape and boxes; ``dtype`` is torch's name if safetensors files do not have the type."""

    dtype: str
    shape: Shape
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class DcpMetadata:
    """Content of ``.metadata``.

    Attributes:
        entries: By name, a tensor, or None for another object.
        paths: By name, its levels in the saved dictionary.
        places: By name and offsets, where a box is stored; other objects have the offsets ``()``.
    """

    entries: dict[str, TensorEntry | None]
    paths: dict[str, tuple[str, ...]]
    places: dict[tuple[str, Shape], StoredBox]


def read_metadata(path: Path) -> DcpMetadata:
    """Read ``.metadata``.

    Raises:
        CheckpointError: The file is damaged, or an entry has no field of this name or no value of its type.
    """
    try:
        metadata = _is(load_plain(path), Inert, "the whole")
        entries = _is(metadata.state_dict_metadata, dict, "state_dict_metadata")
        stored = _is(metadata.storage_data, dict, "storage_data")
        planner = _is(metadata.planner_data or {}, dict, "planner_data")
        paths = {_is(name, str, "a name"): _levels(name, planner) for name in entries}
        places = dict(_place(path, *item) for item in _emptied(stored))
        return DcpMetadata({name: _entry(name, entry) for name, entry in _emptied(entries)}, paths, places)
    except _UnexpectedError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error} has an unexpected value. The file is damaged, or another version of torch "
            f"wrote it. {OLDER}"
        ) from None


class _UnexpectedError(Exception):
    pass


def _is(value: Any, kind: type[_Value], what: str) -> _Value:
    if not isinstance(value, kind):
        raise _UnexpectedError(what)
    return value


def _emptied(held: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield and remove the items: with many ranks, placeholders need more memory than what is read from them."""
    while held:
        yield held.popitem()


def _shape(value: Any, what: str) -> Shape:
    if not isinstance(value, tuple) or not all(isinstance(size, int) and size >= 0 for size in value):
        raise _UnexpectedError(what)
    return value


def _levels(name: str, planner: dict[Any, Any]) -> tuple[str, ...]:
    """Return the levels of an entry; torch joins them to its name, so that a damaged one does not rename a tensor."""
    if not planner:
        return (name,)
    levels = _is(planner.get(name), tuple, f"the path of {name}")
    if not all(isinstance(level, str | int) for level in levels) or ".".join(map(str, levels)) != name:
        raise _UnexpectedError(f"the path of {name}")
    return tuple(map(str, levels))


def _entry(name: str, entry: Any) -> TensorEntry | None:
    entry = _is(entry, Inert, name)
    if entry.kind.name == "BytesStorageMetadata":
        return None
    shape = _shape(entry.size, f"the size of {name}")
    boxes = tuple(_box(name, chunk, len(shape)) for chunk in _is(entry.chunks, list, f"chunks of {name}"))
    return TensorEntry(_dtype(name, _is(entry.properties, Inert, f"properties of {name}")), shape, boxes)


def _box(name: str, chunk: Any, dimensions: int) -> Box:
    chunk = _is(chunk, Inert, f"a chunk of {name}")
    box = (_shape(chunk.offsets, f"an offset of {name}"), _shape(chunk.sizes, f"a size of {name}"))
    if not len(box[0]) == len(box[1]) == dimensions:
        raise _UnexpectedError(f"a chunk of {name}")
    return box


def _dtype(name: str, properties: Inert) -> str:
    """Return the type; torch pickles the properties as a tuple that begins with it."""
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state and isinstance(state[0], Name) else properties.dtype
    dtype = _is(dtype, Name, f"the type of {name}")
    return FROM_TORCH.get(dtype.name, dtype.name)


def _place(path: Path, index: Any, info: Any) -> tuple[tuple[str, Shape], StoredBox]:
    name = _is(_is(index, Inert, "an index").fqn, str, "fqn of an index")
    info, what = _is(info, Inert, f"the place of {name}"), f"the place of {name}"
    place = StoredBox(_is(info.relative_path, str, what), _is(info.offset, int, what), _is(info.length, int, what))
    if place.offset < 0 or place.length < 0 or "/" in place.file or "\0" in place.file:
        raise _UnexpectedError(what)
    if info.get("transform_descriptors"):
        raise CheckpointError(
            f"Cannot read {path.parent / place.file}. The file is compressed or encrypted. Save it without that."
        )
    return (name, _shape(index.get("offset") or (), what)), place
