"""Find ranks that read the same rows in orders of their own, which seldom have one in common in their first batches.

Rows that are in the data twice come to one rank twice about as often as to two ranks. Ranks that each read all of the
data get no row twice and share many, so the difference shows after some dozens of shared rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import DataLoader

Digests = NDArray[np.uint64]
MAX_ROWS: Final = 1 << 14
"""Rows of a rank that are compared at most."""
_MAX_ROWS_OF_ALL: Final = 1 << 20
_FIRST_ROWS: Final = 128
_MIN_SHARED: Final = 48
"""With so many, the chance that rows which are in the data twice look like a fault is below 1e-11 for two ranks."""
_MAX_REPEATED: Final = 1 / 16
"""Of the shared rows. Rows that are in the data twice make as many repeated as shared ones."""
_MAX_IN_STEP: Final = 1 / 4
"""Of the shared rows. More at one distance come from repeated data that is read in order."""


@dataclass(frozen=True)
class Overlap:
    """Two ranks that share rows, the number of those, and the number of rows that each of them had."""

    one: int
    other: int
    shared: int
    rows: int


def find_overlap(ranks: Sequence[Digests]) -> Overlap | None:
    """Return two ranks that read the same data in orders of their own, by the digests of each rank's rows in order."""
    sizes = [len(digests) for digests in ranks]
    values = np.concatenate(ranks)
    rank = np.repeat(np.arange(len(ranks)), sizes)
    position = np.concatenate([np.arange(size) for size in sizes])
    order = np.lexsort((position, rank, values))
    values, rank, position = values[order], rank[order], position[order]
    equal = values[1:] == values[:-1]
    left, right, distance = rank[:-1][equal], rank[1:][equal], np.diff(position)[equal]
    repeated = np.bincount(left[left == right], minlength=len(ranks))
    pairs = np.where(left == right, -1, left * len(ranks) + right)
    for pair, shared in zip(*np.unique(pairs, return_counts=True), strict=True):
        one, other = divmod(int(pair), len(ranks))
        if pair < 0 or shared < _MIN_SHARED or repeated[one] + repeated[other] > _MAX_REPEATED * shared:
            continue
        if not _are_in_step(distance[pairs == pair]):
            return Overlap(one, other, int(shared), min(sizes[one], sizes[other]))
    return None


def _are_in_step(distances: NDArray[np.int64]) -> bool:
    """Return whether one rank reads many rows at the same distance behind the other, as if the data were repeated."""
    values, counts = np.unique(distances, return_counts=True)
    most = int(np.argmax(counts))
    return bool(values[most] != 0 and counts[most] > _MAX_IN_STEP * len(distances))


def rows_until_repeats(loader: "DataLoader[Any] | None", readers: int) -> int | None:
    """Return how many rows each of ``readers`` ranks can read before rows of others come to it rightly.

    That is its part of a data set with a length: in the next epoch, the rows are shared out anew. A streamed data set
    of the library datasets that was not split by node has no such limit, because every rank reads all of it. None if
    the loader does not show how the ranks share the rows.
    """
    if type(loader) is DataLoader and _is_unsplit_stream(loader.dataset):
        return MAX_ROWS
    try:
        return len(loader.dataset) // readers  # type: ignore[arg-type, union-attr]
    except (TypeError, AttributeError, NotImplementedError):
        return None


def _is_unsplit_stream(data: Any) -> bool:
    from datasets import IterableDataset

    return isinstance(data, IterableDataset) and data._distributed is None


def _sizes(limit: int) -> list[int]:
    """Return after how many rows a rank sends all that it had, up to ``limit``."""
    sizes = [_FIRST_ROWS]
    while sizes[-1] <= min(limit, MAX_ROWS):
        sizes.append(sizes[-1] * 3 // 2)
    return sizes[:-1]


class RowExchange:
    """The rows of one rank since its second batch, which it sends to rank 0 from time to time; nobody ever waits.

    Ranks of a tensor-parallel group, which follow each other, read the same rows; the first one sends.
    """

    def __init__(self, group_size: int, limit: int) -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        self.rank, self.group_size = dist.get_rank(), group_size
        self.senders = range(0, dist.get_world_size(), group_size)
        is_sender = self.rank in self.senders
        self.sizes = _sizes(min(limit, _MAX_ROWS_OF_ALL // len(self.senders))) if is_sender else []
        self.rows: list[int] = []
        self.sent = self.compared = 0
        self.store = dist.PrefixStore("shardmake/rows", _get_default_store())

    @property
    def is_done(self) -> bool:
        """Return whether nothing is left to do for this rank."""
        return (self.compared if self.rank == 0 else self.sent) == len(self.sizes)

    @property
    def collects(self) -> bool:
        """Return whether this rank needs the rows of its next batch."""
        return self.sent < len(self.sizes)

    def add(self, digests: str) -> None:
        """Add the rows of a batch, hexadecimal digests joined by commas, and send all if they are enough."""
        self.rows += [int(digest, 16) for digest in filter(None, digests.split(","))]
        size = self.sizes[self.sent]
        if len(self.rows) >= size:
            rows = np.array(self.rows[:size], np.uint64)
            self.store.set(f"{self.sent}/{self.rank}", rows.tobytes())  # type: ignore[arg-type]
            self.sent += 1

    def compare(self) -> Overlap | None:
        """On rank 0, compare what all ranks have sent since; otherwise return None."""
        if self.rank or self.is_done:
            return None
        keys = [f"{self.compared}/{rank}" for rank in self.senders]
        if not self.store.check(keys):
            return None
        self.compared += 1
        found = find_overlap([np.frombuffer(self.store.get(key), np.uint64) for key in keys])
        for key in keys:
            self.store.delete_key(key)
        if found is None:
            return None
        return Overlap(self.senders[found.one], self.senders[found.other], found.shared, found.rows)
