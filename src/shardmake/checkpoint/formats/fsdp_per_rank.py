"""Files with each rank's own part of every tensor: those of Accelerate's FSDP, and verl's.

Accelerate's ``merge-weights`` cannot read these files. Each tensor must be whole on every rank or divided along one
dimension over all ranks. Other meshes (hybrid sharding, tensor parallelism) are rejected, because a file does not
record which part of such a mesh it holds.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats import unpickle
from shardmake.checkpoint.formats.contents import Contents, Piece, StoredTensor, box_pieces, covers, unsharded
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE, Target
from shardmake.checkpoint.formats.models import choose
from shardmake.checkpoint.formats.pickle_machine import Inert
from shardmake.checkpoint.formats.unpickle import ShardRef, TensorRef
from shardmake.core.errors import CheckpointError

_OTHER = "Use another checkpoint."
NAMES = ("pytorch_model_fsdp*_rank*.bin", "model_world_size_*_rank_*.pt")
"""Accelerate's and verl's."""
_FILE = re.compile(r"(?P<model>pytorch_model_fsdp(?:_\d+)?|model_world_size_\d+)_rank_?(?P<rank>\d+)\.(?:bin|pt)")


def recognise(path: Path) -> Path | None:
    """Return ``path`` if it holds per-rank files."""
    places = (path, path / "actor")  # verl's folder of the trained model, beside its critic
    return next((place for place in places for name in NAMES if any(place.glob(name))), None)


def read(folder: Path, target: Target = "keep", key: str | None = None) -> Contents:
    """Read the checkpoint in ``folder``; of several, the one whose files' names begin with ``key``.

    Raises:
        CheckpointError: A rank's file is missing or damaged, the ranks do not agree, or the mesh is not supported.
    """
    files: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := _FILE.fullmatch(path.name):
            files.setdefault(match["model"], {})[int(match["rank"])] = path
    found = choose(files, key, folder)
    count = re.search(r"world_size_(\d+)", next(iter(found.values())).name)
    missing = sorted(set(range(max(max(found) + 1, int(count[1]) if count else 0))) - set(found))
    if missing:
        raise CheckpointError(
            f"{folder} lacks the file of rank {missing[0]}. The checkpoint is not complete. Use an older checkpoint."
        )
    ranks = [unpickle.load(path) for _, path in sorted(found.items())]
    for rank, state in enumerate(ranks):
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{found[rank]} is not a per-rank file. Use another checkpoint.")
    if any(state.keys() != ranks[0].keys() for state in ranks):
        raise CheckpointError(f"The per-rank files in {folder} do not hold the same tensors. Use another checkpoint.")
    tensors = {name: _join(folder, name, [state[name] for state in ranks]) for name in ranks[0]}
    return Contents("per-rank FSDP", folder, None, len(ranks), tensors)


def _join(folder: Path, name: str, parts: Sequence[Any]) -> StoredTensor:
    first = parts[0]
    if isinstance(first, TensorRef):
        return unsharded(name, first)
    if not all(isinstance(part, ShardRef) and part.local.is_contiguous for part in parts):
        raise CheckpointError(f"Cannot merge {folder}. The layout of {name} is not supported. Save with DCP instead.")
    placements = first.spec.placements
    kinds = [held.kind.name for held in placements if isinstance(held, Inert)] if isinstance(placements, tuple) else []
    if len(kinds) != 1 or len(placements) != 1 or kinds[0] not in ("Shard", "Replicate"):
        raise CheckpointError(
            f"Cannot merge {folder}. The mesh of {name} has several dimensions. Save with DCP instead (use_dcp=True)."
        )
    if kinds[0] == "Replicate":
        return unsharded(name, first.local)
    rank = len(first.shape)
    if placements[0].dim not in range(rank) or any(len(part.local.shape) != rank for part in parts):
        raise CheckpointError(f"Cannot merge {folder}. {name} lacks the dimension that is sharded. {_OTHER}")
    boxes, pieces, at = [], list[Piece](), 0
    for local in (part.local for part in parts):
        boxes.append((tuple(at * (index == placements[0].dim) for index in range(len(local.shape))), local.shape))
        at += local.shape[placements[0].dim]
    if not covers(first.shape, boxes):
        raise CheckpointError(f"Cannot merge {folder}. The ranks do not hold the parts of {name}. {_OTHER}")
    for local, box in zip((part.local for part in parts), boxes, strict=True):
        pieces += box_pieces(local.record, local.offset, ITEM_SIZE[local.dtype], first.shape, *box)
    return StoredTensor(name, first.local.dtype, first.shape, tuple(pieces))
