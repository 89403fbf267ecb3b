"""A plain Hugging Face folder, such as DDP training saves: safetensors files, with or without an index."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardmake.consolidate.archive import Record
from shardmake.consolidate.contents import Contents, Piece, Tensor
from shardmake.consolidate.dtypes import ITEM_SIZE
from shardmake.consolidate.unpickle import numel
from shardmake.errors import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors format


def recognises(folder: Path) -> bool:
    """Whether ``folder`` holds a model's safetensors files."""
    return (folder / WEIGHTS).is_file() or (folder / INDEX).is_file()


def read(folder: Path) -> Contents:
    """The model in ``folder``.

    Raises:
        UserError: a file of the index is missing, a header is damaged, or index and files do not agree.
    """
    names = shard_names(folder)
    tensors = {tensor.name: tensor for name in names for tensor in read_file(folder / name)}
    if (folder / INDEX).is_file():
        _check_index(folder, {tensor.name: tensor.pieces for tensor in tensors.values()})
    return Contents("Hugging Face folder", folder, None, 1, tensors)


def read_adapter(path: Path) -> Contents:
    """A PEFT folder: the tensors in its one safetensors file."""
    return Contents("PEFT adapter", path.parent, None, 1, {tensor.name: tensor for tensor in read_file(path)})


def shard_names(folder: Path) -> list[str]:
    """The names of the safetensors files of the model in ``folder``, from the index where there is one."""
    if not (folder / INDEX).is_file():
        return [WEIGHTS]
    names = sorted(set(_weight_map(folder).values()))
    if any("/" in name for name in names):
        raise UserError(f"{folder / INDEX} names files outside its folder.")
    return names


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        index = json.loads((folder / INDEX).read_text())
        return dict(index["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / INDEX} is no index of safetensors files ({error}).") from None


def _check_index(folder: Path, pieces: dict[str, tuple[Piece, ...]]) -> None:
    weight_map = _weight_map(folder)
    wrong = list(weight_map.keys() ^ pieces.keys())
    wrong += [name for name, held in pieces.items() if held and held[0].record.path.name != weight_map.get(name)]
    if wrong:
        raise UserError(f"{folder / INDEX} and its files do not agree about {sorted(wrong)[0]}.")


def read_file(path: Path) -> Iterator[Tensor]:
    """The tensors of one safetensors file, in the order of their bytes; the header is checked as the format demands.

    Raises:
        UserError: the file is missing, cut off, or its header has holes, overlaps or sizes that do not fit.
    """
    header, start, size = _read_header(path)
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    try:
        ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
        at = 0
        for name, entry in ordered:
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if begin != at or end - begin != numel(shape) * ITEM_SIZE[entry["dtype"]]:
                raise _damaged(path, f"{name} does not fit its place")
            at = end
            record = Record(path, start + begin, end - begin, None)
            yield Tensor(name, entry["dtype"], shape, (Piece(record, 0, 0, numel(shape)),) if numel(shape) else ())
    except (KeyError, TypeError, ValueError) as error:
        raise error if isinstance(error, UserError) else _damaged(path, f"its header: {error}") from None
    if start + at != size:
        raise _damaged(path, f"it has {size} bytes, its header describes {start + at}")


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the data starts, and the size of the file, in bytes."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _LARGEST_HEADER + 1
            if length > _LARGEST_HEADER:
                raise _damaged(path, "it has no header")
            return json.loads(file.read(length)), 8 + length, path.stat().st_size
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the model is not complete.") from None
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, UserError) else _damaged(path, "its header is no JSON") from None


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path} is no whole safetensors file: {what}. Write or copy it again.")
