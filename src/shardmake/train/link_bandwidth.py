"""Which link between two nodes is slow: every node sends to the next one, and the rates are compared.

An all-reduce over all ranks is as slow as its slowest link and does not say which that is.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

SLOW = 0.25
"""Part of the fastest link's rate below which a warning is due."""
FEWEST_NODES = 3
"""With fewer there is nothing to compare with."""
Finish = Callable[[Any, torch.Tensor], None]


def rounds(nodes: int) -> list[list[int]]:
    """Links, each by the node that sends (to the next one, the last to the first), so that none shares a node."""
    return [list(range(0, nodes - 1, 2)), list(range(1, nodes - 1, 2)), [nodes - 1]]


def measure(tensor: torch.Tensor, node: int, first_ranks: Sequence[int], finish: Finish) -> float:
    """Seconds that ``tensor`` takes to come from the node before; to be called by the first rank of every node.

    Args:
        tensor: what is sent and overwritten.
        node: this node's place in ``first_ranks``.
        first_ranks: the first rank of every node.
        finish: waits for the work on a tensor, and keeps the deadline.
    """
    nodes, seconds = len(first_ranks), 0.0
    for links in rounds(nodes):
        for _ in range(2):  # the first time connects
            started = time.perf_counter()
            if node in links:
                _do(dist.isend, tensor, first_ranks[(node + 1) % nodes], finish)
            elif (node - 1) % nodes in links:
                _do(dist.irecv, tensor, first_ranks[node - 1], finish)
                seconds = time.perf_counter() - started
    return seconds


def slow_links(seconds: Sequence[float], size: int, hosts: Sequence[str]) -> list[str]:
    """A sentence for each link far slower than the fastest.

    Args:
        seconds: by node, how long ``size`` bytes took from the node before.
        size: bytes.
        hosts: names by node.
    """
    fastest = min(seconds)
    return [
        f"preflight: warning: from {hosts[node - 1]} to {hosts[node]} the network carries {size / took / 1e9:.2f} "
        f"GB/s, the fastest link of this job {size / fastest / 1e9:.2f} GB/s"
        for node, took in enumerate(seconds)
        if fastest < SLOW * took
    ]


def _do(operation: Any, tensor: torch.Tensor, peer: int, finish: Finish) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
        finish(work, tensor)
