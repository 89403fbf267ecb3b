"""A model of PyTorch's CUDA caching allocator: the memory it reserves for a sequence of allocations and frees.

It follows ``c10/cuda/CUDACachingAllocator.cpp``. Sizes are rounded to 512 bytes. Requests up to 1 MiB come from
segments of 2 MiB, those below 10 MiB from segments of 20 MiB. Larger ones get a segment of their own, rounded to 2 MiB.
The smallest free block that is large enough is taken, and split if enough remains. A freed block is joined with free
neighbours. Every stream has separate blocks.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from itertools import count

from shardmake.core.units import MIB

ROUND = 512
SMALL = 1 * MIB
LARGE = 10 * MIB
LARGE_SEGMENT = 20 * MIB
SEGMENT_ROUND = 2 * MIB
NUMBER_BITS = 32


def rounded(size: int) -> int:
    """Return the bytes that an allocation of ``size`` takes."""
    return -(-size // ROUND) * ROUND


@dataclass(slots=True, eq=False)
class _Block:
    size: int
    number: int
    keys: list[int]
    """Keys of the free blocks of its stream and size class."""
    before: "_Block | None" = None
    after: "_Block | None" = None
    free: bool = False


class CachingAllocator:
    """The allocator's state; ``peak`` is the largest total of its segments.

    If a new segment would exceed ``limit``, all segments without an allocated block are released first. A key holds the
    size and number of a free block, to sort them. Functions are not called for what can be written here, for speed.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.reserved = self.peak = 0
        self._limit, self._numbers = limit, count()
        self._keys: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        self._free: dict[int, _Block] = {}
        self._taken: dict[int, _Block] = {}

    def alloc(self, key: int, size: int, stream: int = 0) -> None:
        """Allocate ``size`` bytes, which are `rounded`, under ``key``; what remains of its block is a new one."""
        keys = self._keys[stream][small := size <= SMALL]
        place = bisect_left(keys, size << NUMBER_BITS)
        self._taken[key] = block = self._free.pop(keys.pop(place)) if place < len(keys) else self._segment(size, keys)
        block.free = False
        if (rest := block.size - size) >= (ROUND if small else SMALL + 1):
            block.size, after = size, block.after
            tail = block.after = _Block(rest, next(self._numbers), keys, block, after, True)
            if after is not None:
                after.before = tail
            insort(keys, number := rest << NUMBER_BITS | tail.number)
            self._free[number] = tail

    def free(self, key: int) -> None:
        """Free the block of ``key``, and join it with free neighbours."""
        block = self._taken.pop(key)
        keys, before, after = block.keys, block.before, block.after
        if after is not None and after.free:
            self._remove(after)
            block.size += after.size
            block.after = after = after.after
            if after is not None:
                after.before = block
        if before is not None and before.free:
            self._remove(before)
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            block = before
        block.free = True
        insort(keys, number := block.size << NUMBER_BITS | block.number)
        self._free[number] = block

    def _segment(self, size: int, keys: list[int]) -> _Block:
        length = LARGE_SEGMENT if SMALL < size < LARGE else -(-max(size, 1) // SEGMENT_ROUND) * SEGMENT_ROUND
        if self._limit is not None and self.reserved + length > self._limit:
            for block in [one for one in self._free.values() if one.before is None and one.after is None]:
                self._remove(block)
                self.reserved -= block.size
        self.reserved += length
        self.peak = max(self.peak, self.reserved)
        return _Block(length, next(self._numbers), keys)

    def _remove(self, block: _Block) -> None:
        number = block.size << NUMBER_BITS | block.number
        del block.keys[bisect_left(block.keys, number)], self._free[number]
