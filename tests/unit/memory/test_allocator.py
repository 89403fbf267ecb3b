import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.core.units import MIB
from shardmake.memory.allocator import CachingAllocator, rounded
from shardmake.memory.timeline import Timeline


def test_segments_are_those_of_pytorch() -> None:
    """2 MiB up to 1 MiB, 20 MiB below 10 MiB, else the request rounded to 2 MiB (CUDACachingAllocator.cpp)."""
    for size, segment in ((1, 2), (MIB, 2), (MIB + 1, 20), (9 * MIB, 20), (10 * MIB, 10), (11 * MIB + 1, 12)):
        allocator = CachingAllocator()
        allocator.alloc(0, rounded(size))
        assert allocator.reserved == segment * MIB


BLOCKS: dict[str, tuple[list[tuple[int, float]], int]] = {  # numbers and MiB; zero MiB: the block is freed
    "a free block is reused and split": ([(0, 64), (0, 0), (1, 40), (2, 24)], 64),
    "neighbours are joined": ([(0, 64), (0, 0), (1, 32), (2, 32), (1, 0), (2, 0), (3, 64)], 64),
    "a small remainder is not split off": ([(0, 64), (0, 0), (1, 63), (2, 1.001)], 84),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_those_of_pytorch(name: str) -> None:
    steps, reserved = BLOCKS[name]
    allocator = CachingAllocator()
    for key, size in steps:
        allocator.alloc(key, rounded(int(size * MIB))) if size else allocator.free(key)
    assert allocator.reserved == reserved * MIB


@pytest.mark.parametrize(("second", "limit", "reserved"), [((64, 1), None, 128), ((80, 0), 100, 80)])
def test_streams_do_not_share_and_the_limit_releases(second: tuple[int, int], limit: int | None, reserved: int) -> None:
    allocator = CachingAllocator(limit=limit and limit * MIB)
    allocator.alloc(0, 64 * MIB, stream=0)
    allocator.free(0)
    allocator.alloc(1, second[0] * MIB, stream=second[1])
    assert (allocator.reserved, allocator.peak) == (reserved * MIB, reserved * MIB)


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.booleans()), max_size=60))
def test_reserved_is_at_least_allocated(requests: list[tuple[int, bool]]) -> None:
    timeline = Timeline()
    keys: list[int] = []
    for size, frees in requests:
        keys.append(timeline.alloc(size, "tensor"))
        if frees:
            timeline.free(keys.pop(len(keys) // 2))
    if requests:
        allocated = timeline.peaks[timeline.highest()].total
        assert allocated <= min(timeline.reserved(), sum(rounded(size) for size, _ in requests))


def test_the_terms_of_a_peak_are_those_of_its_moment() -> None:
    timeline = Timeline()
    first = timeline.alloc(3 * MIB, "gradients")
    second = timeline.alloc(2 * MIB, "activations")
    timeline.rename(second, "gradients")
    timeline.free(first)
    timeline.enter("step")
    assert timeline.peaks["load"].terms == {"gradients": 3 * MIB, "activations": 2 * MIB}
    assert timeline.peaks["step"].terms == {"gradients": 2 * MIB}
    timeline.alloc(4 * MIB, "activations")
    assert timeline.peaks["step"].terms == {"gradients": 2 * MIB, "activations": 4 * MIB}
    assert (timeline.highest(), timeline.peaks["step"].total) == ("step", 6 * MIB)
