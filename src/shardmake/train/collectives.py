"""Small collective operations, whose bytes per rank stay small at any number of ranks.

Without a process group this process is the only rank.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardmake.core.private_names import private

T = TypeVar("T")


def get_rank() -> int:
    """Return this process's global rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_node_size() -> int:
    """Return the number of ranks of a node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))


def get_node() -> int:
    """Return the rank of this process's node."""
    return get_rank() // get_node_size()


def is_first_of_node() -> bool:
    """Return True on the first rank of each node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def run_on_first_rank(function: Callable[[], T]) -> T:
    """Call ``function`` on rank 0, and return its result on every rank."""
    result: list[Any] = [function() if get_rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(result, src=0)
    return result[0]


def gather(value: float) -> list[float]:
    """Return every rank's ``value``, by rank: eight bytes per rank."""
    if not dist.is_initialized():
        return [value]
    values = torch.empty(dist.get_world_size(), dtype=torch.float64, device=_device())
    collect = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    collect(values, torch.tensor([value], dtype=torch.float64, device=_device()))
    return values.tolist()


def largest(value: int) -> int:
    """Return the largest ``value`` of all ranks."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value, dtype=torch.int64, device=_device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def first_found(value: T | None) -> T | None:
    """Return the ``value`` of the first rank that has one, on every rank; None if all are None.

    Only that rank sends its object. A gather of objects would send one per rank, each padded to the longest.
    """
    if not dist.is_initialized():
        return value
    found = -largest(-get_rank() if value is not None else -get_world_size())
    if found == get_world_size():
        return None
    result = [value]
    dist.broadcast_object_list(result, src=found)
    return result[0]


def barrier() -> None:
    """Wait until all ranks have called it."""
    largest(0)


def _device() -> torch.device:
    return torch.device(private(dist.distributed_c10d).get_object_coll_device())
