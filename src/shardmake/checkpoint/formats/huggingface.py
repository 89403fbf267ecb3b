"""A plain Hugging Face folder, such as DDP training saves: safetensors or torch files, with or without an index."""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats import unpickle
from shardmake.checkpoint.formats.contents import Contents, Piece, Tensor, whole
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE
from shardmake.checkpoint.formats.naming import ADAPTER, ADAPTER_BIN, MODEL, MODEL_BIN, Naming
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.checkpoint.formats.unpickle import TensorRef, numel
from shardmake.core.errors import ShardmakeError

_LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors format


def naming_of(folder: Path) -> Naming | None:
    """What kind of weights ``folder`` holds; safetensors go first, as in transformers."""
    for naming in (MODEL, MODEL_BIN, ADAPTER, ADAPTER_BIN):
        if (folder / naming.single).is_file() or (folder / naming.index).is_file():
            return naming
    return None


def recognises(folder: Path) -> bool:
    """Whether ``folder`` holds a model's weights."""
    return naming_of(folder) in (MODEL, MODEL_BIN)


def recognises_adapter(folder: Path) -> bool:
    """Whether ``folder`` holds a PEFT adapter's weights."""
    return (folder / ADAPTER.single).is_file() or (folder / ADAPTER_BIN.single).is_file()


def read(folder: Path) -> Contents:
    """The model or adapter in ``folder``.

    Raises:
        ShardmakeError: a file of the index is missing, a header is damaged, or index and files do not agree.
    """
    names = shard_names(folder)
    tensors = {tensor.name: tensor for name in names for tensor in read_file(folder / name)}
    if _index(folder).is_file():
        _check_index(folder, {tensor.name: tensor.pieces for tensor in tensors.values()})
    return Contents("Hugging Face folder", folder, None, 1, tensors)


def read_adapter(folder: Path) -> Contents:
    """A PEFT folder: the tensors in its one file."""
    naming = ADAPTER if (folder / ADAPTER.single).is_file() else ADAPTER_BIN
    tensors = {tensor.name: tensor for tensor in read_file(folder / naming.single)}
    return Contents("PEFT adapter", folder, None, 1, tensors)


def shard_names(folder: Path) -> list[str]:
    """The names of the files with the weights in ``folder``, from the index where there is one."""
    if not _index(folder).is_file():
        return [(naming_of(folder) or MODEL).single]
    names = sorted(set(_weight_map(folder).values()))
    if any("/" in name for name in names):
        raise ShardmakeError(f"{_index(folder)} names files outside its folder.")
    return names


def _index(folder: Path) -> Path:
    return folder / (naming_of(folder) or MODEL).index


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        index = json.loads(_index(folder).read_text())
        return dict(index["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ShardmakeError(f"{_index(folder)} is no index of weight files ({error}).") from None


def _check_index(folder: Path, pieces: dict[str, tuple[Piece, ...]]) -> None:
    weight_map = _weight_map(folder)
    wrong = list(weight_map.keys() ^ pieces.keys())
    wrong += [name for name, held in pieces.items() if held and held[0].record.path.name != weight_map.get(name)]
    if wrong:
        raise ShardmakeError(f"{_index(folder)} and its files do not agree about {sorted(wrong)[0]}.")


def read_file(path: Path) -> Iterator[Tensor]:
    """The tensors of one file of weights, in the order of their bytes.

    Raises:
        ShardmakeError: the file is missing, cut off or damaged.
    """
    return _read_torch(path) if path.suffix == ".bin" else _read_safetensors(path)


def _read_torch(path: Path) -> Iterator[Tensor]:
    """What ``torch.save`` wrote; without running anything from it."""
    if not path.is_file():
        raise ShardmakeError(f"{path} is missing: the model is not complete.")
    state = unpickle.load(path)
    if not isinstance(state, Mapping) or not all(isinstance(ref, TensorRef) for ref in state.values()):
        raise ShardmakeError(f"{path} holds something else than a model's tensors by name.")
    return (whole(name, ref) for name, ref in state.items())


def _read_safetensors(path: Path) -> Iterator[Tensor]:
    """The header is checked as the format demands: no holes, no overlaps, sizes that fit."""
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
            record = ZipRecord(path, start + begin, end - begin, None)
            yield Tensor(name, entry["dtype"], shape, (Piece(record, 0, 0, numel(shape)),) if numel(shape) else ())
    except (KeyError, TypeError, ValueError) as error:
        raise error if isinstance(error, ShardmakeError) else _damaged(path, f"its header: {error}") from None
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
        raise ShardmakeError(f"{path} is missing: the model is not complete.") from None
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, ShardmakeError) else _damaged(path, "its header is no JSON") from None


def _damaged(path: Path, what: str) -> ShardmakeError:
    return ShardmakeError(f"{path} is no whole safetensors file: {what}. Write or copy it again.")
