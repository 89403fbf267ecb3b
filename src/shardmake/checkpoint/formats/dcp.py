"""Checkpoints of torch's distributed checkpoint (DCP), as FSDP1 and FSDP2 write them with SHARDED_STATE_DICT.

``.metadata`` says of every tensor which boxes it was cut into and where each box lies: bytes ``[offset, offset +
length)`` of a ``__R_I.distcp`` file are a ``torch.save`` archive of that one box. Names are nested; Accelerate and the
Trainer save ``{"model": state_dict}``, and ``planner_data`` keeps the levels apart.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats.contents import Contents, Piece, Tensor, box
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.checkpoint.formats.unpickle import Inert, load_plain, numel
from shardmake.core.errors import ShardmakeError

_METADATA = ".metadata"
_MODEL = "model"


def recognises(folder: Path) -> bool:
    """Whether ``folder`` holds a DCP checkpoint, whole or not."""
    return (folder / _METADATA).is_file() or any(folder.glob("*.distcp"))


def read(folder: Path) -> Contents:
    """The checkpoint in ``folder`` (the one with ``.metadata``).

    Raises:
        ShardmakeError: a file is missing, cut off or of another save, or a tensor is stored in an unsupported way.
    """
    if not (folder / _METADATA).is_file():
        raise ShardmakeError(
            f"{folder} has no .metadata: the checkpoint was not written to its end. Take an older one."
        )
    metadata = load_plain(folder / _METADATA)
    described, stored = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(described, Mapping) or not isinstance(stored, Mapping):
        raise ShardmakeError(f"{folder / _METADATA} is not what torch writes there.")
    places = {(index.fqn, tuple(index.offset or ())): info for index, info in stored.items()}
    names = _model_names(described, metadata.planner_data or {})
    _check_files(folder, list(stored.values()))
    tensors = [_tensor(folder, name, fqn, described[fqn], places) for fqn, name in names.items()]
    ranks = {info.relative_path.split("_")[2] for info in stored.values() if info.relative_path.startswith("__")}
    return Contents("torch DCP (FSDP)", folder, None, max(len(ranks), 1), {tensor.name: tensor for tensor in tensors})


def _model_names(described: Mapping[str, Any], planner: Mapping[str, Any]) -> dict[str, str]:
    """By the checkpoint's name, the model's name of each tensor.

    Where the saved dictionary had a level ``model``, the model is what lies below it; else it is all there is.
    """
    paths = {fqn: tuple(str(part) for part in planner.get(fqn, (fqn,))) for fqn in described}
    below = {fqn: _below_model(path) for fqn, path in paths.items()}
    chosen = {fqn: path for fqn, path in below.items() if path} or paths
    return {fqn: ".".join(path) for fqn, path in chosen.items()}


def _below_model(path: tuple[str, ...]) -> tuple[str, ...]:
    return path[path.index(_MODEL) + 1 :] if _MODEL in path[:2] else ()


def _check_files(folder: Path, infos: list[Any]) -> None:
    """Every file is there and exactly as long as ``.metadata`` says."""
    ends: dict[str, int] = {}
    for info in infos:
        if info.transform_descriptors:
            raise ShardmakeError(f"{folder / info.relative_path} is compressed or encrypted, which is not supported.")
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        path = folder / name
        if "/" in name or not path.is_file():
            raise ShardmakeError(
                f"{path} is missing: the checkpoint is not complete. Take an older one, or copy it again."
            )
        if path.stat().st_size != end:
            raise ShardmakeError(
                f"{path} has {path.stat().st_size} bytes, but .metadata describes {end}: it was cut off, or comes from "
                "another save. Take an older checkpoint, or copy it again."
            )


def _tensor(folder: Path, name: str, fqn: str, described: Any, places: Mapping[Any, Any]) -> Tensor:
    if described.chunks is None or described.size is None:
        raise ShardmakeError(
            f"{folder}: {fqn} is no tensor but an object; such state cannot be merged into safetensors."
        )
    dtype, shape = _dtype(folder, fqn, described.properties), tuple(described.size)
    return Tensor(name, dtype, shape, tuple(_pieces(folder, fqn, dtype, shape, described.chunks, places))).check()


def _dtype(folder: Path, fqn: str, properties: Inert) -> str:
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.dtype
    if dtype not in ITEM_SIZE:
        raise ShardmakeError(f"{folder}: the type of {fqn} ({dtype}) is not known.")
    return str(dtype)


def _pieces(
    folder: Path, fqn: str, dtype: str, shape: tuple[int, ...], chunks: Any, places: Mapping[Any, Any]
) -> Iterator[Piece]:
    for chunk in chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        info = places.get((fqn, offsets))
        if info is None:
            raise ShardmakeError(f"{folder}: .metadata does not say where {fqn} at {list(offsets)} lies.")
        size = numel(sizes) * ITEM_SIZE[dtype]
        record = ZipRecord(folder / info.relative_path, info.offset, size, None, box=info.length)
        yield from box(record, 0, ITEM_SIZE[dtype], shape, offsets, sizes)
