"""Tied weights that a checkpoint holds under both names: one is dropped, once the bytes have been compared."""

import os
from collections.abc import Iterable

from shardmake.checkpoint.formats.contents import Piece, Tensor
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE
from shardmake.checkpoint.formats.unpickle import unbox
from shardmake.core.errors import ShardmakeError

_BLOCK = 1 << 20


def without_aliases(tensors: dict[str, Tensor], ties: Iterable[tuple[str, str]]) -> dict[str, Tensor]:
    """``tensors`` without those that the model ties to another one that is there too.

    Args:
        tensors: By name.
        ties: Of each tied weight its name and the name of the weight that it shares.

    Raises:
        ShardmakeError: two tied weights are not equal, so dropping one would lose it.
    """
    aliases = {alias: owner for alias, owner in ties if alias in tensors and owner in tensors and alias != owner}
    for alias, owner in aliases.items():
        if not same_bytes(tensors[alias], tensors[owner]):
            raise ShardmakeError(
                f"The model's config ties {alias} to {owner}, but the checkpoint holds different values for them. Set "
                "tie_word_embeddings to false in the config.json if both are wanted."
            )
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes; those cut differently count as different."""
    if (one.dtype, one.shape, len(one.pieces)) != (other.dtype, other.shape, len(other.pieces)):
        return False
    pairs = zip(_ordered(one), _ordered(other), strict=True)
    return all(_same_piece(a, b, one.dtype) for a, b in pairs)


def _ordered(tensor: Tensor) -> list[Piece]:
    return sorted(tensor.pieces, key=lambda piece: piece.at)


def _same_piece(one: Piece, other: Piece, dtype: str) -> bool:
    if (one.at, one.count, one.runs, one.stride) != (other.at, other.count, other.runs, other.stride):
        return False
    places = [(unbox(piece.record, dtype), piece.start) for piece in (one, other)]
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
