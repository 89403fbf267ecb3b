from hypothesis import given
from hypothesis import strategies as st

from shardmake.core.units import MIB
from shardmake.memory.allocator import CachingAllocator, rounded
from shardmake.memory.timeline import Timeline


def test_segments_are_those_of_pytorch() -> None:
    """2 MiB up to 1 MiB, 20 MiB below 10 MiB, else the request rounded to 2 MiB (CUDACachingAllocator.cpp)."""
    for size, segment in ((1, 2), (MIB, 2), (MIB + 1, 20), (9 * MIB, 20), (10 * MIB, 10), (11 * MIB + 1, 12)):
        allocator = CachingAllocator()
        allocator.alloc(0, size)
        assert allocator.reserved == segment * MIB


def test_a_free_block_is_reused_and_split() -> None:
    allocator = CachingAllocator()
    allocator.alloc(0, 64 * MIB)
    allocator.free(0)
    allocator.alloc(1, 40 * MIB)
    allocator.alloc(2, 24 * MIB)
    assert allocator.reserved == 64 * MIB


def test_neighbours_are_joined() -> None:
    allocator = CachingAllocator()
    allocator.alloc(0, 64 * MIB)
    allocator.free(0)
    for key in (1, 2):
        allocator.alloc(key, 32 * MIB)
    for key in (1, 2):
        allocator.free(key)
    allocator.alloc(3, 64 * MIB)
    assert allocator.reserved == 64 * MIB


def test_a_small_remainder_is_not_split_off() -> None:
    allocator = CachingAllocator()
    allocator.alloc(0, 64 * MIB)
    allocator.free(0)
    allocator.alloc(1, 63 * MIB)
    allocator.alloc(2, MIB + 1)
    assert allocator.reserved == 84 * MIB


def test_streams_do_not_share() -> None:
    allocator = CachingAllocator()
    allocator.alloc(0, 64 * MIB, stream=0)
    allocator.free(0)
    allocator.alloc(1, 64 * MIB, stream=1)
    assert allocator.reserved == 128 * MIB


def test_free_segments_are_released_at_the_limit() -> None:
    allocator = CachingAllocator(limit=100 * MIB)
    allocator.alloc(0, 64 * MIB)
    allocator.free(0)
    allocator.alloc(1, 80 * MIB)
    assert (allocator.reserved, allocator.peak) == (80 * MIB, 80 * MIB)


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.booleans()), max_size=60))
def test_reserved_is_at_least_allocated(requests: list[tuple[int, bool]]) -> None:
    timeline = Timeline()
    keys: list[int] = []
    for size, frees in requests:
        keys.append(timeline.alloc(size, "tensor"))
        if frees:
            timeline.free(keys.pop(len(keys) // 2))
    assert timeline.reserved() >= (timeline.allocated if requests else 0)
    assert timeline.allocated <= sum(rounded(size) for size, _ in requests) if requests else True


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
    assert (timeline.highest(), timeline.allocated) == ("step", 6 * MIB)
