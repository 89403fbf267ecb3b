"""Accelerate's per-rank FSDP files, ``pytorch_model_fsdp_rankR.bin``: each rank's own part of every tensor.

Accelerate's ``merge-weights`` cannot read them. Merged where each tensor is cut along one dimension over all ranks, or
is whole on each; other meshes (hybrid sharding, tensor parallel) are refused, because a file does not say which part of
such a mesh it holds.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats import unpickle
from shardmake.checkpoint.formats.contents import Contents, Piece, Tensor, box, whole
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE
from shardmake.checkpoint.formats.unpickle import ShardRef, TensorRef
from shardmake.core.errors import ShardmakeError

_FILE = re.compile(r"pytorch_model_fsdp_rank(\d+)\.bin")


def recognises(folder: Path) -> bool:
    """Whether ``folder`` holds per-rank files."""
    return any(folder.glob("pytorch_model_fsdp_rank*.bin"))


def read(folder: Path) -> Contents:
    """The checkpoint in ``folder``.

    Raises:
        ShardmakeError: a rank's file is missing or damaged, the ranks do not agree, or the mesh is not a plain one.
    """
    found = {int(match[1]): path for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))}
    missing = sorted(set(range(max(found))) - set(found))
    if missing:
        raise ShardmakeError(f"{folder} lacks the file of rank {missing[0]}: the checkpoint is not complete.")
    ranks = [_load(found[rank]) for rank in sorted(found)]
    if any(state.keys() != ranks[0].keys() for state in ranks):
        raise ShardmakeError(f"The per-rank files in {folder} do not hold the same tensors. Take another checkpoint.")
    tensors = {name: _tensor(folder, name, [state[name] for state in ranks]) for name in ranks[0]}
    return Contents("Accelerate per-rank FSDP", folder, None, len(ranks), tensors)


def _load(path: Path) -> Mapping[str, Any]:
    state = unpickle.load(path)
    if not isinstance(state, Mapping):
        raise ShardmakeError(f"{path} is no per-rank file of Accelerate.")
    return state


def _tensor(folder: Path, name: str, parts: Sequence[Any]) -> Tensor:
    first = parts[0]
    if isinstance(first, TensorRef):
        return whole(name, first)
    if not all(isinstance(part, ShardRef) and part.local.is_contiguous for part in parts):
        raise ShardmakeError(f"{folder}: {name} is stored in a way that is not supported.")
    placements = first.spec.placements
    if len(placements) != 1 or type(placements[0]).__name__ not in ("Shard", "Replicate"):
        raise ShardmakeError(
            f"{folder}: {name} lies on a mesh of several dimensions. Save with DCP instead (use_dcp=True)."
        )
    if type(placements[0]).__name__ == "Replicate":
        return whole(name, first.local)
    pieces: list[Piece] = []
    dimension, at = placements[0].dim, 0
    for part in parts:
        sizes, local = part.local.shape, part.local
        offsets = tuple(at if index == dimension else 0 for index in range(len(sizes)))
        pieces += box(local.record, local.offset, ITEM_SIZE[local.dtype], first.shape, offsets, sizes)
        at += sizes[dimension]
    return Tensor(name, first.local.dtype, first.shape, tuple(pieces)).check()
