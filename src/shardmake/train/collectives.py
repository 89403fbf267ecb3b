"""Small collective operations on Python objects; without a process group this process is the only rank."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

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


def gather(value: T) -> list[T]:
    """Return every rank's ``value``, by rank; wait until all ranks have called it."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Wait until all ranks have called it."""
    gather(None)
