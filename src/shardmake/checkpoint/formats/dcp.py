"""Checkpoints of torch's distributed checkpoint (DCP), as FSDP1 and FSDP2 write them with SHARDED_STATE_DICT.

``.metadata`` records the boxes of every tensor and where each box is stored. Bytes ``[offset, offset + length)`` of a
``__R_I.distcp`` file are a ``torch.save`` archive of one box. Names are nested: Accelerate and the Trainer save
``{"model": state_dict}``, Lightning ``{"state_dict": ...}``, and torchtitan puts the weights beside ``optimizer`` and
``train_state``. ``planner_data`` keeps the levels separate.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats.contents import Contents, Piece, StoredTensor, box_pieces
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE, Target
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.checkpoint.formats.unpickle import Inert, load_plain, numel
from shardmake.core.errors import CheckpointError

MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
"""Accelerate's names for the only model and its optimizer."""
_METADATA = ".metadata"
_MODEL = "model"
_NO_WEIGHTS = re.compile(r"optim.*|lr_.*|schedulers?|train_state|dataloader.*|loops|callbacks|.*rng.*")
"""Levels beside the weights in checkpoints of torchtitan, Lightning and users' own loops."""
_OLDER = "Use an older checkpoint, or copy this one again."


def recognise(path: Path) -> Path | None:
    """Return the folder of a DCP checkpoint, complete or not: ``path`` or Accelerate's folder in it."""
    candidates = (path, path / MODEL_FOLDER)
    return next((it for it in candidates if (it / _METADATA).is_file() or any(it.glob("*.distcp"))), None)


def read(folder: Path, target: Target = "keep") -> Contents:
    """Read the checkpoint in ``folder`` (the one with ``.metadata``).

    Raises:
        CheckpointError: A file is missing, truncated or of another save, or a tensor is stored in an unsupported way.
    """
    if not (folder / _METADATA).is_file():
        raise CheckpointError(f"{folder} has no .metadata. The checkpoint was not finished. Use an older checkpoint.")
    metadata = load_plain(folder / _METADATA)
    described, stored = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(described, Mapping) or not isinstance(stored, Mapping):
        raise CheckpointError(f"{folder / _METADATA} is not a metadata file of torch. {_OLDER}")
    places = {(index.fqn, tuple(index.offset or ())): info for index, info in stored.items()}
    names = _model_names(described, metadata.planner_data or {})
    _check_files(folder, list(stored.values()))
    tensors = [_read_tensor(folder, name, fqn, described[fqn], places) for fqn, name in names.items()]
    ranks = {info.relative_path.split("_")[2] for info in stored.values() if info.relative_path.startswith("__")}
    return Contents("torch DCP (FSDP)", folder, None, max(len(ranks), 1), {tensor.name: tensor for tensor in tensors})


def _model_names(described: Mapping[str, Any], planner: Mapping[str, Any]) -> dict[str, str]:
    """Return the model's name of each tensor by the checkpoint's name.

    If the saved dictionary has a level ``model``, the model is below that level. Otherwise it is the whole dictionary
    without optimizer, scheduler and the like; a single level that holds everything else is not part of the names.
    """
    paths = {fqn: tuple(str(part) for part in planner.get(fqn, (fqn,))) for fqn in described}
    below = {fqn: _below_model(path) for fqn, path in paths.items()}
    chosen = {fqn: path for fqn, path in below.items() if path} or _without_training_state(paths, described)
    return {fqn: ".".join(path) for fqn, path in chosen.items()}


def _without_training_state(
    paths: Mapping[str, tuple[str, ...]], described: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """Return the paths without training states, and without values such as a step beside the weights."""
    chosen = {
        fqn: path
        for fqn, path in paths.items()
        if not (len(path) > 1 and _NO_WEIGHTS.fullmatch(path[0]))
        and (described[fqn].chunks is not None or fqn.endswith("_extra_state"))
    }
    levels = {path[0] if len(path) > 1 else "" for path in chosen.values()}
    return {fqn: path[1:] for fqn, path in chosen.items()} if len(levels) == 1 and "" not in levels else chosen


def _below_model(path: tuple[str, ...]) -> tuple[str, ...]:
    return path[path.index(_MODEL) + 1 :] if _MODEL in path[:2] else ()


def _check_files(folder: Path, infos: list[Any]) -> None:
    """Raise `CheckpointError` unless every file exists with exactly the length in ``.metadata``."""
    ends: dict[str, int] = {}
    for info in infos:
        if info.transform_descriptors:
            raise CheckpointError(
                f"Cannot read {folder / info.relative_path}. The file is compressed or encrypted. Save it without that."
            )
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        path = folder / name
        if "/" in name or not path.is_file():
            raise CheckpointError(f"{path} is missing. The checkpoint is not complete. {_OLDER}")
        if path.stat().st_size != end:
            raise CheckpointError(
                f"{path} has {path.stat().st_size} bytes, but .metadata describes {end}. The file is truncated or "
                f"comes from another save. {_OLDER}"
            )


def _read_tensor(folder: Path, name: str, fqn: str, described: Any, places: Mapping[Any, Any]) -> StoredTensor:
    if described.chunks is None or described.size is None:
        raise CheckpointError(
            f"Cannot merge {folder}. The entry {fqn} is not a tensor, and safetensors files hold tensors only."
        )
    dtype, shape = _read_dtype(folder, fqn, described.properties), tuple(described.size)
    pieces = _read_pieces(folder, fqn, dtype, shape, described.chunks, places)
    return StoredTensor(name, dtype, shape, tuple(pieces)).check()


def _read_dtype(folder: Path, fqn: str, properties: Inert) -> str:
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.dtype
    if dtype not in ITEM_SIZE:
        raise CheckpointError(f"Cannot read {folder}. The type {dtype} of {fqn} is not supported.")
    return str(dtype)


def _read_pieces(
    folder: Path, fqn: str, dtype: str, shape: tuple[int, ...], chunks: Any, places: Mapping[Any, Any]
) -> Iterator[Piece]:
    for chunk in chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        info = places.get((fqn, offsets))
        if info is None:
            raise CheckpointError(f"{folder / _METADATA} does not locate {fqn} at {list(offsets)}. {_OLDER}")
        size = numel(sizes) * ITEM_SIZE[dtype]
        record = ZipRecord(folder / info.relative_path, info.offset, size, None, archive_length=info.length)
        yield from box_pieces(record, 0, ITEM_SIZE[dtype], shape, offsets, sizes)
