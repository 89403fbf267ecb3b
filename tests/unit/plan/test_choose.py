"""The choice among candidates with given figures: no model, no simulation."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shardmake.config.models import Strategy
from shardmake.core.units import GIB
from shardmake.memory.estimate import Estimate, GpuMemory
from shardmake.plan.candidates import Candidate
from shardmake.plan.choose import NothingFitsError, choose
from shardmake.plan.fallbacks import find_fallbacks
from shardmake.plan.reasons import beside, reason_of, rejected
from shardmake.plan.verdict import FAMILY_ERRORS, FamilyError, Headroom, Verdict, judge
from shardmake.run.plan import Choice

CAPACITY = 80 * GIB
GPUS = SimpleNamespace(is_cpu=False, gpu_memory=CAPACITY, host_memory=1000 * GIB, nvme=None)
SETTINGS = SimpleNamespace(hardware=GPUS, precision="bf16", run=SimpleNamespace(strategy="auto", objective="sft"))
ERROR = FAMILY_ERRORS["sharded"]


def memory(device: float, wanted: float | None = None) -> Estimate:
    size = int(device * GIB)
    gpu = GpuMemory(size, size, int((wanted or device) * GIB), size, "backward", {})
    return Estimate(gpu, {}, {}, {})


def candidate(
    strategy: Strategy,
    seconds: float,
    device: float,
    headroom: Headroom = Headroom.ENOUGH,
    *,
    nodes: int = 1,
    checkpointing: bool = True,
) -> Candidate:
    choice = Choice(
        strategy=strategy, gradient_checkpointing=checkpointing, micro_batch_size=1, gradient_accumulation_steps=1,
        nodes=nodes, processes_per_node=8, precision="bf16",
    )  # fmt: skip
    fits = device <= 80
    reason = f"fits: {device} of 80.0 GiB per GPU" if fits else f"needs {device} GiB of GPU memory, 80.0 GiB available"
    return Candidate(choice, memory(device), Verdict(fits, reason, headroom), ERROR, seconds, simulated=False)


class Simulator:
    """A planner whose simulations return the given figures, and that counts them."""

    def __init__(self, *candidates: Candidate) -> None:
        self.settings: Any = SETTINGS
        self.asked: list[str] = []
        self._by_choice = [(item.choice, replace(item, simulated=True)) for item in candidates]

    def simulate(self, choice: Choice) -> Candidate:
        found = next(item for its, item in self._by_choice if its == choice)
        self.asked.append(found.name)
        return found


def chosen(*candidates: Candidate) -> Candidate:
    return choose(list(candidates), Simulator(*candidates))[0]  # type: ignore[arg-type]


TIGHT = candidate("fsdp", 14.2, 78.5, Headroom.TIGHT)
OFFLOAD = candidate("fsdp-offload", 83.9, 16.7)


@pytest.mark.parametrize(
    ("device", "smaller", "headroom"),
    [
        (60.0, 60.0, Headroom.ENOUGH),
        (78.0, 70.0, Headroom.ENOUGH),
        (78.0, 75.0, Headroom.TIGHT),
        (78.0, 78.0, Headroom.LITTLE),
    ],
)
def test_headroom_is_what_still_fits_on_a_smaller_gpu(device: float, smaller: float, headroom: Headroom) -> None:
    """PyTorch's cache holds less on a GPU that has less, so 78 of 80 GiB may be room enough."""
    error = FamilyError("sharded", 10, 0.05, 0.10)
    asked = []

    def device_on(capacity: int) -> int:
        asked.append(capacity)
        return int(smaller * GIB)

    found = judge(memory(device), None, GPUS, error, device_on)  # type: ignore[arg-type]
    assert found.fits and found.headroom == headroom
    assert found.reason.startswith("fits: " if headroom == Headroom.ENOUGH else "tight: ")
    assert asked == [int(CAPACITY / 1.10), int(CAPACITY / 1.05)][: len(asked)]


def test_the_figure_without_a_limit_is_that_of_the_device() -> None:
    found = judge(memory(60.0, 85.0), None, GPUS, ERROR, lambda capacity: 0)  # type: ignore[arg-type]
    assert found.reason == "fits: 60.0 of 80.0 GiB per GPU (85.0 GiB if PyTorch's cache had no limit)"


def test_a_tight_candidate_is_taken_if_it_is_clearly_faster() -> None:
    assert chosen(TIGHT, OFFLOAD).name == TIGHT.name
    assert chosen(TIGHT, replace(OFFLOAD, step_seconds=15.0)).name == OFFLOAD.name


def test_little_headroom_is_the_last_resort() -> None:
    risky = candidate("fsdp", 14.2, 79.5, Headroom.LITTLE)
    assert chosen(risky, OFFLOAD).name == OFFLOAD.name
    assert chosen(risky, candidate("fsdp-offload", 83.9, 90.0)).name == risky.name


def test_a_tight_candidate_needs_a_fallback() -> None:
    """A fallback is of the same library, so an offload of DeepSpeed is none below FSDP."""
    other = candidate("zero3-offload", 83.9, 16.7)
    assert chosen(TIGHT, other).name == other.name


def test_more_nodes_are_taken_where_they_cost_clearly_less() -> None:
    few, many = candidate("zero3-offload", 727, 60.0, nodes=4), candidate("zero3", 144, 60.0, nodes=16)
    assert chosen(few, many).name == many.name
    assert chosen(few, replace(many, step_seconds=170.0)).name == few.name


def test_only_what_can_be_better_is_simulated() -> None:
    few, many = candidate("zero2", 10.0, 60.0), candidate("zero2", 6.0, 40.0, nodes=2)
    slow = candidate("zero3", 20.0, 30.0)
    planner = Simulator(few, many, slow)
    choose([few, many, slow], planner)  # type: ignore[arg-type]
    assert planner.asked == [few.name]


def test_the_reason_states_risk_times_and_what_comes_below() -> None:
    planner = Simulator(TIGHT, OFFLOAD)
    choice, found = choose([TIGHT, OFFLOAD], planner)  # type: ignore[arg-type]
    fallbacks, found = find_fallbacks(choice, found, planner)  # type: ignore[arg-type]
    assert [item.name for item in fallbacks] == [OFFLOAD.name]
    said = reason_of(choice, found, fallbacks)
    assert said.startswith(
        "fsdp, checkpointing, micro batch 1, 1 node: about 14.2 s per step and 78.5 of 80.0 GiB per GPU, "
        "the fastest of 2 candidates that fit on 1 node. It is tight: "
    )
    assert "fsdp-offload, checkpointing, micro batch 1, 1 node has more headroom and takes 83.9 s." in said
    assert said.endswith("training continues with fsdp-offload, checkpointing, micro batch 1, 1 node.")
    assert rejected(choice, found) == {OFFLOAD.name: "83.9 s per step against 14.2 s, 16.7 of 80.0 GiB per GPU"}


def test_no_reason_calls_a_faster_candidate_slower() -> None:
    risky = candidate("fsdp", 14.2, 79.5, Headroom.LITTLE)
    equal = candidate("zero2", 84.2, 40.0)
    slower = candidate("zero3", 99.0, 20.0)
    large = candidate("ddp", 5.0, 300.0)
    many = candidate("fsdp-offload", 45.0, 10.0, nodes=2)
    safe = candidate("zero1", 84.3, 50.0)
    choice, found = choose([risky, equal, slower, large, many, safe], Simulator(risky, equal, slower, many, safe))  # type: ignore[arg-type]
    assert choice.name == safe.name
    lead = reason_of(choice, found, [])
    assert "the fastest of 4 candidates that fit on 1 node, except for 1 faster one with too little headroom" in lead
    against = rejected(choice, found)
    assert against[risky.name].startswith("tight: 14.2 s per step against 84.3 s, 79.5 of 80.0 GiB per GPU; estimates")
    assert against[equal.name].startswith("not simpler, and as fast in two digits: 84.2 s per step against 84.3 s")
    assert against[slower.name].startswith("99 s per step against 84.3 s")
    assert against[large.name] == "needs 300.0 GiB of GPU memory, 80.0 GiB available (5 s per step, closed form)"
    assert against[many.name].startswith("720 GPU-seconds per step on 2 nodes, against 674 on 1 (45 s per step, ")


def test_more_nodes_are_explained() -> None:
    few, many = candidate("zero3-offload", 727, 60.0, nodes=4), candidate("zero3", 144, 60.0, nodes=16)
    choice, found = choose([few, many], Simulator(few, many))  # type: ignore[arg-type]
    assert reason_of(choice, found, []).endswith(
        "It takes 18,432 GPU-seconds per step; zero3-offload, checkpointing, micro batch 1, 4 nodes, the cheapest on "
        "fewer nodes, takes 23,264 (727 s per step)."
    )


def test_nothing_fits_carries_every_candidate() -> None:
    large = candidate("ddp", 5.0, 300.0)
    with pytest.raises(NothingFitsError, match=r"Nothing fits: even ddp, .* needs 300.0 GiB") as caught:
        chosen(large)
    assert caught.value.candidates == [large]


def test_a_change_on_other_nodes_is_compared_in_gpu_time() -> None:
    chosen, fewer = candidate("fsdp", 424.0, 70.0, nodes=16), candidate("fsdp", 516.0, 70.0, nodes=8)
    assert beside(fewer, chosen) == " against 424 s on 16, 33,024 GPU-seconds against 54,272"
    assert beside(candidate("fsdp", 300.0, 70.0, nodes=16), chosen) == " against 424 s"
