"""Find slow links between nodes: every node sends to the next one, and the rates are compared.

An all-reduce over all ranks is as slow as its slowest link, but does not identify it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

SLOW = 0.25
"""Fraction of the fastest link's rate below which a link is reported."""
MIN_NODES = 3
"""With fewer nodes there is only one link, and nothing to compare."""
Finish = Callable[[Any, torch.Tensor], None]


def rounds(nodes: int) -> list[list[int]]:
    """Return rounds of links without a common node; a link is named by its sender, which sends to the next node."""
    return [list(range(0, nodes - 1, 2)), list(range(1, nodes - 1, 2)), [nodes - 1]]


def measure(tensor: torch.Tensor, node: int, first_ranks: Sequence[int], finish: Finish) -> float:
    """Return the seconds that ``tensor`` takes from the previous node; the first rank of every node must call it.

    Args:
        tensor: Sent and overwritten.
        node: This node's index in ``first_ranks``.
        first_ranks: The first rank of every node.
        finish: Waits for the work on a tensor, with a deadline.
    """
    nodes, seconds = len(first_ranks), 0.0
    for links in rounds(nodes):
        for _ in range(2):  # the first pass opens the connection
            started = time.perf_counter()
            if node in links:
                _transfer(dist.isend, tensor, first_ranks[(node + 1) % nodes], finish)
            elif (node - 1) % nodes in links:
                _transfer(dist.irecv, tensor, first_ranks[node - 1], finish)
                seconds = time.perf_counter() - started
    return seconds


def slow_links(seconds: Sequence[float], size: int, hosts: Sequence[str]) -> list[str]:
    """Return a message for each link that is much slower than the fastest.

    Args:
        seconds: By node, the time of ``size`` bytes from the previous node.
        size: Bytes.
        hosts: Host names by node.
    """
    fastest = min(seconds)
    return [
        f"preflight: the network from {hosts[node - 1]} to {hosts[node]} reaches {size / took / 1e9:.2f} GB/s; the "
        f"fastest link of this job reaches {size / fastest / 1e9:.2f} GB/s"
        for node, took in enumerate(seconds)
        if fastest < SLOW * took
    ]


def _transfer(operation: Any, tensor: torch.Tensor, peer: int, finish: Finish) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
        finish(work, tensor)
