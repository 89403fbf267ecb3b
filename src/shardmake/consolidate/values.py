"""The values of a weight file's tensors: finite, zero, or rows of -inf, with which some models ban tokens."""

import os
from pathlib import Path

import numpy as np

from shardmake.checkpoint.formats.contents import StoredTensor
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE
from shardmake.consolidate.blocks import Block

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_CHUNK = 1 << 16  # elements of bf16 per check; they stay in the core's cache
_BLOCK = 4 << 20


def is_finite(block: Block, dtype: str) -> bool:
    """Return True if no value is NaN or infinite; types without such values are always finite."""
    if dtype in _FLOATS:
        return bool(np.isfinite(block.view(_FLOATS[dtype])).all())
    if dtype != "BF16":
        return True
    bits = block.view(np.uint16)
    chunks = (bits[at : at + _CHUNK] & 0x7FFF for at in range(0, bits.size, _CHUNK))
    return all(chunk.max() < 0x7F80 for chunk in chunks)  # all ones in the exponent: infinity or NaN


def infinite_rows(path: Path, start: int, tensor: StoredTensor) -> int | None:
    """Return the number of rows that hold -inf and nothing else; None if any other value is not finite.

    Args:
        path: The file.
        start: Offset of the tensor's first byte in the file.
        tensor: A floating tensor. A row is the last dimension of a matrix, and an element of a vector.
    """
    width = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    size = width * ITEM_SIZE[tensor.dtype]
    at_once, count = max(1, _BLOCK // size), 0
    with path.open("rb") as file:
        for begin in range(0, tensor.nbytes, at_once * size):
            content = os.pread(file.fileno(), min(at_once * size, tensor.nbytes - begin), start + begin)
            finite, negative = _masks(np.frombuffer(content, np.uint8), tensor.dtype)
            banned = negative.reshape(-1, width).all(axis=1)
            if not (finite.reshape(-1, width).all(axis=1) | banned).all():
                return None
            count += int(banned.sum())
    return count


def _masks(block: Block, dtype: str) -> tuple[Block, Block]:
    """Return which values are finite and which are -inf."""
    if dtype == "BF16":
        bits = block.view(np.uint16)
        return (bits & 0x7F80) != 0x7F80, bits == 0xFF80
    values = block.view(_FLOATS[dtype])
    return np.isfinite(values), np.isneginf(values)
