"""The rows that each rank trains on first: their number, their digests, and the comparison between the ranks."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardmake.core.private_names import private

logger = logging.getLogger(__name__)
WAIT = timedelta(minutes=5)
"""How long a rank waits for the digests of the others, which may still load their data."""
_ROWS_FIRST = ("input_ids", "inputs_embeds", "pixel_values", "labels")


def tensors(inputs: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested dictionaries and sequences, those whose first dimension surely is rows first."""
    if isinstance(inputs, torch.Tensor):
        yield inputs
    elif isinstance(inputs, Mapping):
        first = [name for name in _ROWS_FIRST if name in inputs]
        for name in [*first, *(name for name in inputs if name not in first)]:
            yield from tensors(inputs[name])
    elif isinstance(inputs, list | tuple):
        for value in inputs:
            yield from tensors(value)


def count_rows(inputs: Any) -> int | None:
    """Return the size of the first dimension of the inputs, or None if they have no tensor with dimensions."""
    return next((len(tensor) for tensor in tensors(inputs) if tensor.dim()), None)


def digest_rows(inputs: Any) -> str:
    """Return a digest of each row of the inputs, joined by commas; empty if there are no tensors with dimensions.

    Positions that the attention mask (rows x length) excludes are left out, because a row is padded to the longest of
    its batch. If the tensors have different first dimensions, all of them count as one row.
    """
    found = [tensor.detach().cpu() for tensor in tensors(inputs) if tensor.dim()]
    if len({len(tensor) for tensor in found}) != 1:
        return _digest(found) if found else ""
    mask = _attention_mask(inputs)
    rows = zip(*found, strict=True)
    if mask is None:
        return ",".join(map(_digest, rows))
    return ",".join(_digest(_unpadded(row, kept)) for row, kept in zip(rows, mask.detach().cpu().bool(), strict=True))


def _attention_mask(inputs: Any) -> torch.Tensor | None:
    """Return the first attention mask of rows x length in nested dictionaries and sequences."""
    if isinstance(inputs, Mapping):
        mask = inputs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            return mask
    values = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, list | tuple) else ()
    return next((mask for mask in map(_attention_mask, values) if mask is not None), None)


def _unpadded(row: Iterable[torch.Tensor], kept: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors of a row; those with the length of ``kept`` only where that is True."""
    for tensor in row:
        yield tensor[kept] if tensor.dim() and len(tensor) == len(kept) else tensor


def _digest(found: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in found:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def exchange(text: str) -> list[str] | None:
    """Return the ``text`` of every rank, through the store of the process group; None if a rank does not answer."""
    store = dist.PrefixStore("shardmake/first-batch", private(dist.distributed_c10d).get_default_store())
    keys = [str(rank) for rank in range(dist.get_world_size())]
    store.set(str(dist.get_rank()), text)
    try:
        store.wait(keys, WAIT)
    except RuntimeError:  # DistStoreError is one
        return None
    return [store.get(key).decode() for key in keys]


def conflict(digests: Sequence[str], tensor_parallel: int) -> tuple[int, int] | None:
    """Return two ranks whose rows overlap and must not, or are different and must be equal; None if all are right.

    Ranks of one tensor-parallel group, which follow each other, need the same rows, all others different ones. One row
    that two ranks share may be in the data twice; so may several if a rank has one of its rows twice.
    """
    holders: dict[str, list[int]] = {}
    for leader in range(0, len(digests), tensor_parallel):
        for member in range(leader + 1, leader + tensor_parallel):
            if digests[member] != digests[leader]:
                return leader, member
        rows = digests[leader].split(",")
        shared = Counter(other for row in set(rows) for other in holders.get(row, ()))
        for other, count in sorted(shared.items()):
            others = digests[other].split(",")
            is_once = len(set(rows)) == len(rows) and len(set(others)) == len(others)
            if digests[other] == digests[leader] or (count > 1 and is_once):
                return other, leader
        for row in set(rows):
            holders.setdefault(row, []).append(leader)
    return None
