from dataclasses import replace

import pytest

from shardmake.config.models import Precision
from shardmake.memory import host, states
from shardmake.memory.timeline import REDUCTION, Timeline
from shardmake.memory.zero import REDUCTIONS, Zero3Memory, Zero12Memory
from tests.unit.memory.llama_8b import BUCKETS, MODEL, scenario

LARGE = [tensor for tensor in MODEL.tensors if tensor.numel > BUCKETS.reduce_bucket_size]
SMALL = [tensor for tensor in MODEL.tensors if tensor.kind == "norm"]


@pytest.fixture
def memory() -> Zero3Memory:
    zero = Zero3Memory(scenario(), BUCKETS, Timeline())
    zero.load()
    return zero


def waiting(memory: Zero3Memory) -> int:
    return memory.timeline._terms.get("gradients before reduction", 0)


def test_a_gradient_larger_than_the_bucket_stays_until_the_next_one(memory: Zero3Memory) -> None:
    timeline, (first, second) = memory.timeline, LARGE[:2]
    for tensor in (first, second):
        key = timeline.alloc(2 * tensor.numel, "backward temporaries")
        assert memory.gradient(tensor.name, key) and waiting(memory) == 2 * tensor.numel
    memory.end_backward()
    assert waiting(memory) == 0


def test_memory_of_reduced_gradients_is_reused_when_enough_others_follow(memory: Zero3Memory) -> None:
    timeline = memory.timeline
    keys = [timeline.alloc(2 * tensor.numel, "backward temporaries") for tensor in LARGE[: REDUCTIONS + 2]]
    for tensor, key in zip(LARGE, keys, strict=False):
        memory.gradient(tensor.name, key)
    assert [event[0] for event in timeline.events if event[1] < 0 and event[0] in keys] == keys[:1]


@pytest.mark.parametrize("count", [1, 3])
def test_several_gradients_are_copied_from_the_bucket_in_one_piece(memory: Zero3Memory, count: int) -> None:
    memory.buckets = replace(BUCKETS, reduce_bucket_size=500_000_000)
    for tensor in SMALL[:count]:
        key = memory.timeline.alloc(2 * tensor.numel, "backward temporaries")
        assert not memory.gradient(tensor.name, key)
    memory.end_backward()
    copies = [size for _, size, stream in memory.timeline.events if stream == REDUCTION and size > 0]
    assert copies == ([2 * 4096 * count] if count > 1 else [])


@pytest.mark.parametrize(("accumulation", "copies"), [(1, 1), (2, 2)])
def test_zero2_adds_a_micro_steps_gradients_to_those_of_earlier_ones(accumulation: int, copies: int) -> None:
    case = scenario(strategy="zero2", accumulation=accumulation)
    zero = Zero12Memory(case, BUCKETS, Timeline())
    zero.load()
    held = []
    for _ in range(accumulation):
        zero.start_backward()
        zero.gradient(SMALL[0].name, None)
        held.append(zero.timeline._terms["gradients"])
        zero.end_backward()
    part = states.partition_gradients(case)
    assert held[-1] == pytest.approx(copies * part, abs=1024)
    assert zero.timeline._terms["gradients"] == pytest.approx(part, abs=512)


@pytest.mark.parametrize(("precision", "bytes_each"), [("fp16", 3), ("bf16", 0), ("fp32", 0)])
def test_zero3_looks_for_infinities_in_a_copy_of_its_part(precision: Precision, bytes_each: int) -> None:
    case = scenario(precision=precision)
    zero = Zero3Memory(case, BUCKETS, Timeline())
    zero.load()
    before = len(zero.timeline.events)
    zero.timeline.enter("optimizer step")
    zero.step()
    made = [size for _, size, stream in zero.timeline.events[before:] if stream == REDUCTION and size > 0]
    assert sum(made) == pytest.approx(bytes_each * case.split.trainable / 8, abs=1024)


def test_under_offload_the_check_needs_host_memory() -> None:
    case = scenario(strategy="zero3-offload", precision="fp16", checkpoint_in_memory=False)
    part = case.split.trainable // 8
    assert host.host_terms(case, BUCKETS)["overflow check"] == 8 * 3 * part
    zero = Zero3Memory(case, BUCKETS, Timeline())
    zero.load()
    zero.step()
    assert "overflow check" not in zero.timeline._terms
