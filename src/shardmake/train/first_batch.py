"""The rows that each rank trains on first: their number, a digest, and the comparison between the ranks."""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

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
    """Return a digest of all tensors in the inputs; empty if there are none with dimensions."""
    found = [tensor.detach().cpu().contiguous() for tensor in tensors(inputs) if tensor.dim()]
    digest = hashlib.sha256()
    for tensor in found:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if found else ""


def exchange(text: str) -> list[str] | None:
    """Return the ``text`` of every rank, through the store of the process group; None if a rank does not answer."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = dist.PrefixStore("shardmake/first-batch", _get_default_store())
    keys = [str(rank) for rank in range(dist.get_world_size())]
    store.set(str(dist.get_rank()), text)
    try:
        store.wait(keys, WAIT)
    except RuntimeError:  # DistStoreError is one
        return None
    return [store.get(key).decode() for key in keys]


def conflict(digests: Sequence[str], tensor_parallel: int) -> tuple[int, int] | None:
    """Return two ranks whose rows are equal and must not be, or are different and must be equal; None if all are right.

    Ranks of one tensor-parallel group, which follow each other, need the same rows, all others different ones.
    """
    for one, other in combinations(range(len(digests)), 2):
        is_group = one // tensor_parallel == other // tensor_parallel
        if (digests[one] == digests[other]) != is_group:
            return one, other
    return None
