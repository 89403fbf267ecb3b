"""Checkpoints of torch's distributed checkpoint (DCP), as FSDP1 and FSDP2 write them with SHARDED_STATE_DICT.

``.metadata`` records the boxes of every tensor and where each box is stored. Bytes ``[offset, offset + length)`` of a
``__R_I.distcp`` file are a ``torch.save`` archive of one box. Names are nested: Accelerate and the Trainer save
``{"model": state_dict}``, Lightning ``{"state_dict": ...}``, and torchtitan puts the weights beside ``optimizer`` and
``train_state``. ``planner_data`` keeps the levels separate.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from shardmake.checkpoint.formats.boxes import covers
from shardmake.checkpoint.formats.contents import Contents, Piece, StoredTensor, box_pieces, is_extra_state
from shardmake.checkpoint.formats.dcp_metadata import OLDER, DcpMetadata, StoredBox, TensorEntry, read_metadata
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE, Target
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.checkpoint.formats.unpickle import numel
from shardmake.core.errors import CheckpointError

MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
"""Accelerate's names for the only model and its optimizer."""
_METADATA = ".metadata"
_MODEL = "model"
_NO_WEIGHTS = re.compile(r"optim.*|lr_.*|schedulers?|train_state|dataloader.*|loops|callbacks|.*rng.*")
"""Levels beside the weights in checkpoints of torchtitan, Lightning and users' own loops."""
_RANK = re.compile(r"__(\d+)_")


def recognise(path: Path) -> Path | None:
    """Return the folder of a DCP checkpoint, complete or not: ``path`` or Accelerate's folder in it."""
    candidates = (path, path / MODEL_FOLDER)
    return next((it for it in candidates if (it / _METADATA).is_file() or any(it.glob("*.distcp"))), None)


def read(folder: Path, target: Target = "keep", key: str | None = None) -> Contents:
    """Read the checkpoint in ``folder`` (the one with ``.metadata``); of several models, read the one at ``key``.

    Raises:
        CheckpointError: A file is missing, truncated or of another save, or a tensor is stored in an unsupported way.
    """
    if not (folder / _METADATA).is_file():
        raise CheckpointError(f"{folder} has no .metadata. The checkpoint was not finished. Use an older checkpoint.")
    metadata = read_metadata(folder / _METADATA)
    names = _model_names(folder, metadata, key)
    _check_files(folder, metadata.places.values())
    others = {fqn for fqn, name in names.items() if metadata.entries[fqn] is None and is_extra_state(name)}
    tensors = [_read_tensor(folder, name, fqn, metadata) for fqn, name in names.items() if fqn not in others]
    ranks = {match[1] for place in metadata.places.values() if (match := _RANK.match(place.file))}
    return Contents(
        format="torch DCP (FSDP)",
        folder=folder,
        step=None,
        world_size=max(len(ranks), 1),
        tensors={tensor.name: tensor for tensor in tensors},
        left_out=tuple(sorted(names[fqn] for fqn in others)),
    )


def _model_names(folder: Path, metadata: DcpMetadata, key: str | None) -> dict[str, str]:
    """Return the name of each of the model's tensors by the checkpoint's name.

    If the saved dictionary has a level ``model``, the model is below that level. Otherwise it is the whole dictionary
    without optimizer, scheduler and the like; a single level that holds everything else is not part of the names.

    Raises:
        CheckpointError: The checkpoint holds several models and ``key`` does not name one, or ``key`` names none.
    """
    models = _models(metadata)
    names = ", ".join(sorted(filter(None, models)))
    chosen = {name: found for name, found in models.items() if key is None or name == key}
    if len(chosen) > 1:
        raise CheckpointError(
            f"{folder} holds several models ({names}). Which one is meant is not recorded. Name one with --key."
        )
    if not chosen:
        raise CheckpointError(f"{folder} holds no model {key!r}. Leave out --key, or name one of: {names or 'none'}.")
    return {fqn: ".".join(path) for found in chosen.values() for fqn, path in found.items()}


Paths = dict[str, tuple[str, ...]]
"""The levels of each tensor's name in its model, by the checkpoint's name."""


def _models(metadata: DcpMetadata) -> dict[str, Paths]:
    """Return the paths of each model's tensors by its key: the levels above them, joined by dots."""
    found: dict[str, Paths] = {}
    for fqn, path in metadata.paths.items():
        level = path[:2].index(_MODEL) + 1 if _MODEL in path[:2] else 0
        if level and len(path) > level:
            found.setdefault(".".join(path[:level]), {})[fqn] = path[level:]
    rest = _without_training_state(metadata)
    levels: dict[str, Paths] = {}
    for fqn, path in rest.items():
        if len(path) > 1 and _MODEL not in path[:2]:
            levels.setdefault(path[0], {})[fqn] = path[1:]
    if not found:
        is_nested = sum(map(len, levels.values())) == len(rest)
        several = is_nested and len(levels) > 1 and any(_is_same_model(held, levels) for held in levels.values())
        if several:
            return levels
        return levels if is_nested and len(levels) == 1 else {"": rest}
    return found | {name: held for name, held in levels.items() if _is_same_model(held, found)}


def _is_same_model(held: Paths, models: Mapping[str, Paths]) -> bool:
    """Return True if one of the other ``models`` has a tensor of the same name, as a copy of averages has."""
    names = set(held.values())
    return any(names & set(other.values()) for other in models.values() if other is not held)


def _without_training_state(metadata: DcpMetadata) -> Paths:
    """Return the paths without training states, and without values such as a step beside the weights."""
    return {
        fqn: path
        for fqn, path in metadata.paths.items()
        if not (len(path) > 1 and _NO_WEIGHTS.fullmatch(path[0]))
        and (metadata.entries[fqn] is not None or is_extra_state(fqn))
    }


def _check_files(folder: Path, places: Iterable[StoredBox]) -> None:
    """Raise `CheckpointError` unless every file exists with exactly the length in ``.metadata``."""
    ends: dict[str, int] = {}
    for place in places:
        ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
    for name, end in ends.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing. The checkpoint is not complete. {OLDER}")
        if path.stat().st_size != end:
            raise CheckpointError(
                f"{path} has {path.stat().st_size} bytes, but .metadata describes {end}. The file is truncated or "
                f"comes from another save. {OLDER}"
            )


def _read_tensor(folder: Path, name: str, fqn: str, metadata: DcpMetadata) -> StoredTensor:
    entry = metadata.entries[fqn]
    if entry is None:
        raise CheckpointError(
            f"Cannot merge {folder}. The entry {fqn} is not a tensor, and safetensors files hold tensors only."
        )
    if entry.dtype not in ITEM_SIZE:
        raise CheckpointError(f"Cannot read {folder}. The type {entry.dtype} of {fqn} is not supported.")
    if not covers(entry.shape, entry.boxes):
        raise CheckpointError(
            f"{folder / _METADATA} divides {fqn} {list(entry.shape)} into boxes that overlap or leave a part out. "
            f"{OLDER}"
        )
    return StoredTensor(name, entry.dtype, entry.shape, tuple(_read_pieces(folder, fqn, entry, metadata))).check()


def _read_pieces(folder: Path, fqn: str, entry: TensorEntry, metadata: DcpMetadata) -> Iterator[Piece]:
    itemsize = ITEM_SIZE[entry.dtype]
    for offsets, sizes in entry.boxes:
        place = metadata.places.get((fqn, offsets))
        if place is None:
            raise CheckpointError(f"{folder / _METADATA} does not locate {fqn} at {list(offsets)}. {OLDER}")
        size = numel(sizes) * itemsize
        if size > place.length:
            raise CheckpointError(
                f"{folder / place.file} has {place.length} bytes for the {size} of {fqn} at {list(offsets)}. {OLDER}"
            )
        record = ZipRecord(folder / place.file, place.offset, size, None, archive_length=place.length)
        yield from box_pieces(record, 0, itemsize, entry.shape, offsets, sizes)
