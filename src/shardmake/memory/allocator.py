"""A model of PyTorch's CUDA caching allocator: the memory it reserves for a sequence of allocations and frees.

It follows ``c10/cuda/CUDACachingAllocator.cpp``. Sizes are rounded to 512 bytes. Requests up to 1 MiB come from
segments of 2 MiB, those below 10 MiB from segments of 20 MiB. Larger ones get a segment of their own, rounded to 2 MiB.
The smallest free block that is large enough is taken, and split if enough remains. A freed block is joined with free
neighbours. Every stream has separate blocks.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from shardmake.core.units import MIB

ROUND = 512
SMALL = 1 * MIB
SMALL_SEGMENT = 2 * MIB
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
    pool: "_Pool"
    number: int
    before: "_Block | None" = None
    after: "_Block | None" = None
    free: bool = False


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks of one stream and size class, sorted by size and number; one integer holds both, for speed."""

    least_rest: int
    keys: list[int] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)

    def put(self, block: _Block) -> None:
        block.free = True
        key = block.size << NUMBER_BITS | block.number
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: _Block) -> None:
        key = block.size << NUMBER_BITS | block.number
        del self.keys[bisect_left(self.keys, key)], self.blocks[key]


class CachingAllocator:
    """The allocator's state; ``peak`` is the largest total of its segments.

    If a new segment would exceed ``limit``, all segments without an allocated block are released first.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.reserved = self.peak = self._numbers = 0
        self._limit = limit
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._taken: dict[int, _Block] = {}

    def alloc(self, key: int, size: int, stream: int = 0) -> None:
        """Allocate ``size`` bytes under ``key``; what remains of its block is a new one."""
        size = rounded(size)
        small = size <= SMALL
        if (pool := self._pools.get((stream, small))) is None:
            pool = self._pools[stream, small] = _Pool(ROUND if small else SMALL + 1)
        keys = pool.keys
        place = bisect_left(keys, size << NUMBER_BITS)
        block = pool.blocks.pop(keys.pop(place)) if place < len(keys) else self._segment(size, pool)
        block.free = False
        if (rest := block.size - size) >= pool.least_rest:
            self._numbers += 1
            tail = _Block(rest, pool, self._numbers, block, block.after)
            if tail.after is not None:
                tail.after.before = tail
            block.size, block.after = size, tail
            pool.put(tail)
        self._taken[key] = block

    def free(self, key: int) -> None:
        """Free the block of ``key``, and join it with free neighbours."""
        block = self._taken.pop(key)
        pool, before, after = block.pool, block.before, block.after
        if after is not None and after.free:
            pool.remove(after)
            _join(block, after)
        if before is not None and before.free:
            pool.remove(before)
            _join(before, block)
            block = before
        pool.put(block)

    def _segment(self, size: int, pool: _Pool) -> _Block:
        large = LARGE_SEGMENT if size < LARGE else -(-size // SEGMENT_ROUND) * SEGMENT_ROUND
        length = SMALL_SEGMENT if size <= SMALL else large
        if self._limit is not None and self.reserved + length > self._limit:
            self._release()
        self.reserved += length
        self.peak = max(self.peak, self.reserved)
        self._numbers += 1
        return _Block(length, pool, self._numbers)

    def _release(self) -> None:
        for pool in self._pools.values():
            for block in [block for block in pool.blocks.values() if block.before is None and block.after is None]:
                pool.remove(block)
                self.reserved -= block.size


def _join(left: _Block, right: _Block) -> None:
    left.size += right.size
    left.after = right.after
    if right.after is not None:
        right.after.before = left
