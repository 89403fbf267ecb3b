"""Measure the network between all ranks: the bandwidth of an all-reduce, and the links between the nodes.

An all-reduce is as slow as its slowest link, but does not identify it. So every node also sends to the next one.
"""

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardmake.run.attempt import host_name

Finding = tuple[int, str]
"""Level and message of a log line."""
MIN_BANDWIDTH = 0.25
"""Fraction of the planned bandwidth below which a warning is logged."""
GPU_BYTES = 64 << 20
_CPU_BYTES = 1 << 20
_REPEATS = 3
SLOW = 0.25
"""Fraction of the fastest link's rate below which a link is reported."""
MIN_NODES = 3
"""With fewer nodes there is only one link, and nothing to compare."""


def device_of_rank(on_cpu: bool) -> torch.device:
    """Return the device of this rank."""
    return torch.device("cpu" if on_cpu else f"cuda:{os.environ['LOCAL_RANK']}")


def measure_network(store: Any, on_cpu: bool, planned: float | None, deadline: float) -> list[Finding]:
    """Run all-reduces, then measure the links between the nodes; return the findings on rank 0."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = _CPU_BYTES if on_cpu else GPU_BYTES
    tensor = torch.ones(size // 4, device=device_of_rank(on_cpu))
    _all_reduce(tensor, deadline)
    started = time.perf_counter()
    for _ in range(_REPEATS):
        _all_reduce(tensor.fill_(1), deadline)
    seconds = (time.perf_counter() - started) / _REPEATS
    if tensor[0].item() != world_size:
        raise ArithmeticError(f"the all-reduce over {world_size} ranks returned {tensor[0].item()}")
    slow = _compare_links(store, tensor, deadline)
    _all_reduce(tensor.fill_(1), deadline)  # no rank leaves while others still measure
    return [describe_bandwidth(seconds, size, world_size, planned), *slow] if rank == 0 else []


def describe_bandwidth(seconds: float, size: int, world_size: int, planned: float | None) -> Finding:
    """Return the bus bandwidth of an all-reduce of ``size`` bytes; 2 (n - 1) / n of them cross each rank's link."""
    bandwidth = 2 * (world_size - 1) / world_size * size / seconds
    line = f"preflight: all-reduce of {size >> 20} MiB over {world_size} ranks at {bandwidth / 1e9:.2f} GB/s"
    if planned is None or bandwidth >= MIN_BANDWIDTH * planned:
        return logging.INFO, line
    return (
        logging.WARNING,
        f"{line}, far below the {planned / 1e9:.1f} GB/s of the cluster file. Check the network of these nodes.",
    )


def _compare_links(store: Any, tensor: torch.Tensor, deadline: float) -> list[Finding]:
    """Return warnings about slow links on rank 0; torch's launcher sets `GROUP_RANK` and similar variables."""
    node, nodes = int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if nodes < MIN_NODES or os.environ["LOCAL_RANK"] != "0":
        return []
    step = int(os.environ["LOCAL_WORLD_SIZE"])
    seconds = _measure_link(tensor, node, [number * step for number in range(nodes)], deadline)
    store.set(f"link-{node}", f"{seconds} {host_name()}")
    if node:
        return []
    results = [store.get(f"link-{number}").decode().split() for number in range(nodes)]
    times, hosts = [float(words[0]) for words in results], [words[1] for words in results]
    return [(logging.WARNING, line) for line in slow_links(times, tensor.nbytes, hosts)]


def _all_reduce(tensor: torch.Tensor, deadline: float) -> None:
    _finish(dist.all_reduce(tensor, async_op=True), tensor, deadline)


def _finish(work: Any, tensor: torch.Tensor, deadline: float) -> None:
    """Wait for ``work``; gloo keeps the deadline itself, NCCL must be polled."""
    give_up = time.monotonic() + deadline
    while tensor.is_cuda and not work.is_completed():
        if time.monotonic() > give_up:
            raise TimeoutError(f"the network check did not end within {deadline:.0f} s")
    work.wait()
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def rounds(nodes: int) -> list[list[int]]:
    """Return rounds of links without a common node; a link is named by its sender, which sends to the next node."""
    return [list(range(0, nodes - 1, 2)), list(range(1, nodes - 1, 2)), [nodes - 1]]


def _measure_link(tensor: torch.Tensor, node: int, first_ranks: Sequence[int], deadline: float) -> float:
    """Return the seconds that ``tensor``, which is overwritten, takes from the previous node.

    The first rank of every node must call it; ``node`` is this node's index in ``first_ranks``.
    """
    nodes, seconds = len(first_ranks), 0.0
    for links in rounds(nodes):
        for _ in range(2):  # the first pass opens the connection
            started = time.perf_counter()
            if node in links:
                _transfer(dist.isend, tensor, first_ranks[(node + 1) % nodes], deadline)
            elif (node - 1) % nodes in links:
                _transfer(dist.irecv, tensor, first_ranks[node - 1], deadline)
                seconds = time.perf_counter() - started
    return seconds


def slow_links(seconds: Sequence[float], size: int, hosts: Sequence[str]) -> list[str]:
    """Return a message for each link that is much slower than the fastest.

    ``seconds`` is the time of ``size`` bytes from the previous node, by node like the names ``hosts``.
    """
    fastest = min(seconds)
    return [
        f"preflight: the network from {hosts[node - 1]} to {hosts[node]} reaches {size / took / 1e9:.2f} GB/s; the "
        f"fastest link of this job reaches {size / fastest / 1e9:.2f} GB/s"
        for node, took in enumerate(seconds)
        if fastest < SLOW * took
    ]


def _transfer(operation: Any, tensor: torch.Tensor, peer: int, deadline: float) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
        _finish(work, tensor, deadline)
