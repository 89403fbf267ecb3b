"""Tied weights that a checkpoint holds under both names: one is dropped if the bytes are equal."""

import os
from collections.abc import Iterable

from shardmake.checkpoint.formats.contents import Piece, StoredTensor
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE
from shardmake.checkpoint.formats.unpickle import locate
from shardmake.core.errors import CheckpointError

_BLOCK = 1 << 20


def without_aliases(tensors: dict[str, StoredTensor], ties: Iterable[tuple[str, str]]) -> dict[str, StoredTensor]:
    """Return ``tensors`` without those that the model ties to another stored tensor.

    Args:
        tensors: Tensors by name.
        ties: Name of each tied weight and of the weight that it shares.

    Raises:
        CheckpointError: Two tied weights are not equal, so that dropping one would lose it.
    """
    aliases = {alias: owner for alias, owner in ties if alias in tensors and owner in tensors and alias != owner}
    for alias, owner in aliases.items():
        if not have_same_bytes(tensors[alias], tensors[owner]):
            raise CheckpointError(
                f"The model's config ties {alias} to {owner}, but the checkpoint holds different values for them. Set "
                "tie_word_embeddings to false in the config.json to keep both."
            )
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}


def have_same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Return True if two tensors hold the same bytes; tensors with different pieces count as different."""
    if (one.dtype, one.shape, len(one.pieces)) != (other.dtype, other.shape, len(other.pieces)):
        return False
    pairs = zip(_ordered(one), _ordered(other), strict=True)
    return all(_is_same_piece(a, b, one.dtype) for a, b in pairs)


def _ordered(tensor: StoredTensor) -> list[Piece]:
    return sorted(tensor.pieces, key=lambda piece: piece.at)


def _is_same_piece(one: Piece, other: Piece, dtype: str) -> bool:
    if (one.at, one.count, one.runs, one.stride) != (other.at, other.count, other.runs, other.stride):
        return False
    places = [(locate(piece.record, dtype), piece.start) for piece in (one, other)]
    files = [os.open(record.path, os.O_RDONLY) for record, _ in places]
    try:
        size = one.numel * ITEM_SIZE[dtype]
        return all(
            len({os.pread(file, min(_BLOCK, size - at), record.offset + start + at)
                 for file, (record, start) in zip(files, places, strict=True)}) == 1
            for at in range(0, size, _BLOCK)
        )  # fmt: skip
    finally:
        for file in files:
            os.close(file)
