"""The choice among candidates with given figures: no model, no simulation."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from shardmake.config.models import Strategy
from shardmake.core.units import GIB
from shardmake.memory.estimate import Estimate
from shardmake.plan.candidates import Candidate
from shardmake.plan.choose import NothingFitsError, choose
from shardmake.plan.fallbacks import find_fallbacks
from shardmake.plan.reasons import beside, reason_of, rejected
from shardmake.plan.verdict import HOST_ERROR, FamilyError, Headroom, judge
from shardmake.run.plan import Choice, GpuEstimate, PlaceEstimate
from tests.unit.wording import Wording

CAPACITY = 80 * GIB
GPUS = SimpleNamespace(is_cpu=False, gpu_memory=CAPACITY, host_memory=1000 * GIB, nvme=None)
RUN, DENSE = SimpleNamespace(strategy="auto", objective="sft"), SimpleNamespace(text_config={})
SETTINGS = SimpleNamespace(hardware=GPUS, precision="bf16", run=RUN, model=DENSE)
ERROR = FamilyError("sharded", 10, 0.05, 0.10)


def memory(device: float, tensors: float | None = None) -> Estimate:
    size = int(device * GIB)
    sizes = {"allocated": int((tensors or device) * GIB), "reserved": size, "wanted": size, "device": size}
    nothing = PlaceEstimate(total=0, terms={})
    return Estimate(gpu=GpuEstimate(**sizes, phase="backward", terms={}), host=nothing, nvme=nothing, disk=nothing)


def candidate(
    strategy: Strategy, seconds: float, device: float, headroom: Headroom = Headroom.ENOUGH, *, nodes: int = 1,
    checkpointing: bool = True,
) -> Candidate:  # fmt: skip
    choice = Choice(
        strategy=strategy, gradient_checkpointing=checkpointing, micro_batch_size=1, gradient_accumulation_steps=1,
        nodes=nodes, processes_per_node=8, precision="bf16",
    )  # fmt: skip
    fits = device <= 80
    reason = f"fits: {device} of 80.0 GiB per GPU" if fits else f"needs {device} GiB of GPU memory, 80.0 GiB available"
    return Candidate(fits, reason, headroom, ERROR, choice, memory(device), seconds, simulated=False)


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


TIGHT = candidate("fsdp", 14.2, 78.5, Headroom.TIGHT)
OFFLOAD = candidate("fsdp-offload", 83.9, 16.7)
RISKY = candidate("fsdp", 14.2, 79.5, Headroom.LITTLE)
LARGE = candidate("fsdp", 5.0, 300.0)
OTHER = candidate("zero3", 83.9, 16.7)
FAST = candidate("zero3-offload", 7.0, 60.0)
FEW, MANY = candidate("zero3", 727, 60.0, nodes=4), candidate("zero3", 144, 60.0, nodes=16)


def split(micro: int, passes: int, device: float) -> Candidate:
    made = candidate("fsdp", 6.0, device)
    changes = {"micro_batch_size": micro, "gradient_accumulation_steps": passes}
    return replace(made, choice=made.choice.model_copy(update=changes))


TAKEN: dict[str, tuple[Candidate, ...]] = {
    "tight, and clearly faster": (TIGHT, OFFLOAD, OTHER),
    "tensors with a margin before offload": (replace(RISKY, headroom=Headroom.TENSORS), OFFLOAD),
    "nearly as fast as a tight one": (replace(OTHER, step_seconds=15.0), TIGHT, OFFLOAD),
    "slower than a tight one without a fallback, which would be of the same library": (OTHER, TIGHT),
    # Offload is taken only where nothing else fits, not for time, headroom or fewer nodes: its time is not proven.
    "slower than offload": (candidate("zero3", 84.0, 60.0), FAST),
    "tighter than offload": (TIGHT, FAST),
    "on more nodes than offload": (MANY, FAST),
    "offload where nothing else fits": (FAST, LARGE),
    "offload rather than the last GiB": (OFFLOAD, RISKY),
    "the last GiB rather than too much": (RISKY, candidate("fsdp-offload", 83.9, 90.0)),
    **{
        f"{first} rather than {second} of equal time": (candidate(first, 10.01, 60.0), candidate(second, 10.0, 40.0))
        for first, second in (("ddp", "zero1"), ("zero2", "fsdp"), ("fsdp", "zero3"))
    },
    "offload of the optimizer alone": (
        candidate("zero3-offload-optimizer", 30.0, 60.0), LARGE, candidate("zero3-offload", 20.0, 40.0)
    ),
    "more nodes for clearly less": (MANY, FEW),
    "fewer nodes for little more": (FEW, replace(MANY, step_seconds=170.0)),
    "beside five others, of which no faster one is called slower": (
        candidate("zero1", 84.3, 50.0), RISKY, candidate("zero2", 84.2, 40.0), candidate("zero3", 99.0, 20.0),
        candidate("ddp", 5.0, 300.0), candidate("fsdp-offload", 45.0, 10.0, nodes=2),
    ),
    # 235B on H100: FSDP on 8 nodes takes a third of the GPU-time, and fills the last GiB.
    "dearer, with a margin": (
        candidate("zero3", 40.1, 60.0, nodes=4), candidate("fsdp", 6.2, 79.9, Headroom.LITTLE, nodes=8)
    ),
    # 235B: micro batch 1 accumulates in fp32 and does not fit; micro batch 2 needs no accumulation.
    "a larger micro batch that needs less": (split(2, 1, 70.0), split(1, 2, 98.2)),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_the_first_one_is_taken_for_its_reason(case: str, wording: Wording) -> None:
    candidates = TAKEN[case]
    planner = Simulator(*candidates)
    choice, found = choose(list(candidates), planner)  # type: ignore[arg-type]
    assert choice.name == candidates[0].name == choose(list(reversed(candidates)), planner)[0].name  # type: ignore[arg-type]
    hopeless = {one.name for one in candidates if one.memory.gpu.device > 100 * GIB}
    assert not hopeless & {*planner.asked}, "it is not simulated"
    fallbacks, found = find_fallbacks(choice, found, planner)  # type: ignore[arg-type]
    against = [f"{name}: {reason}" for name, reason in rejected(choice, found).items()]
    wording("\n".join([reason_of(choice, found, fallbacks), *against]))


@pytest.mark.parametrize(("device", "smaller", "headroom"), [
    (60.0, 60.0, Headroom.ENOUGH), (78.0, 70.0, Headroom.ENOUGH), (78.0, 75.0, Headroom.TIGHT), (78.0, 78.0, 0),
])  # fmt: skip
def test_headroom_is_what_still_fits_on_a_smaller_gpu(device: float, smaller: float, headroom: int) -> None:
    """PyTorch's cache holds less on a GPU that has less, so 78 of 80 GiB may be room enough."""
    on = Mock(return_value=int(smaller * GIB))
    found = judge(memory(device, smaller), None, GPUS, ERROR, on)  # type: ignore[arg-type]
    assert found.fits and found.headroom == headroom
    assert found.reason.startswith("fits: " if headroom == Headroom.ENOUGH else "tight: ")
    assert {call.args[0] for call in on.call_args_list} <= {int(CAPACITY / 1.10), int(CAPACITY / 1.05)}


def test_only_tensors_that_exceed_the_gpu_are_refused() -> None:
    """Runs with expandable segments held up to a quarter less than the cache is estimated to hold."""
    for tensors, fits, headroom in ((71.2, True, Headroom.TENSORS), (75.0, True, Headroom.LITTLE), (80.1, False, 0)):
        found = judge(memory(88.7, tensors), None, GPUS, ERROR, lambda capacity: int(88.7 * GIB))  # type: ignore[arg-type]
        assert (found.fits, found.headroom) == (fits, headroom)
        if fits:
            assert found.reason == f"tight: {tensors} to 88.7 of 80.0 GiB per GPU"


@pytest.mark.parametrize(("ram", "headroom"), [(900, Headroom.ENOUGH), (920, Headroom.TIGHT), (999, Headroom.LITTLE)])
def test_a_node_s_ram_needs_a_margin_as_well(ram: int, headroom: Headroom) -> None:
    """405B would fill 1800.0 of 1800 GiB."""
    need = PlaceEstimate(total=ram * GIB, terms={"optimizer states": ram * GIB})
    found = judge(memory(40.0).model_copy(update={"host": need}), None, GPUS, ERROR, lambda capacity: 0)  # type: ignore[arg-type]
    assert found.fits and found.headroom == headroom
    assert ("GiB of a node's RAM" in found.reason) == (found.error is HOST_ERROR) == (headroom != Headroom.ENOUGH)


def test_each_fallback_is_the_largest_that_needs_at_most_seven_tenths() -> None:
    """One H100 ran out of memory with micro batch 8, planned for 142 GiB; 4 fits and is a quarter faster than 1."""

    def of(micro: int, device: float, strategy: Strategy = "ddp", checkpointing: bool = False) -> Candidate:
        made = candidate(strategy, 10.0, device, checkpointing=checkpointing)
        return replace(made, choice=made.choice.model_copy(update={"micro_batch_size": micro}))

    first = of(8, 79.0)
    others = [
        of(6, 60.0), of(4, 46.0), of(2, 30.0), of(1, 31.0), of(8, 44.0, checkpointing=True),
        of(1, 26.0, checkpointing=True), of(8, 5.0, "zero2-offload"),
    ]  # fmt: skip
    fallbacks, _ = find_fallbacks(first, [first, *others], Simulator(first, *others))  # type: ignore[arg-type]
    assert [item.memory.gpu.device / GIB for item in fallbacks] == [46.0, 31.0, 26.0, 5.0]


def test_a_mixture_takes_no_tight_one_for_its_speed() -> None:
    """No published run of a mixture is among those whose typical error the margin covers."""
    safe, tight, below = candidate("fsdp", 5.7, 70.0), replace(TIGHT, step_seconds=3.9), OFFLOAD
    planner = Simulator(safe, tight, below)
    planner.settings = SimpleNamespace(**{**vars(SETTINGS), "model": SimpleNamespace(text_config={"num_experts": 128})})
    assert choose([safe, tight, below], planner)[0].name == safe.name  # type: ignore[arg-type]
    assert choose([tight, below], planner)[0].name == tight.name  # type: ignore[arg-type]


def test_only_what_can_be_better_is_simulated() -> None:
    few, many = candidate("zero2", 10.0, 60.0), candidate("zero2", 6.0, 40.0, nodes=2)
    slow = candidate("zero3", 20.0, 30.0)
    planner = Simulator(few, many, slow)
    choose([few, many, slow], planner)  # type: ignore[arg-type]
    assert planner.asked == [few.name]


def test_nothing_fits_carries_every_candidate() -> None:
    large = candidate("ddp", 5.0, 300.0)
    with pytest.raises(NothingFitsError, match=r"Nothing fits: even ddp, .* needs 300.0 GiB") as caught:
        choose([large], Simulator(large))  # type: ignore[arg-type]
    assert caught.value.candidates == [large]


def test_a_change_on_other_nodes_is_compared_in_gpu_time() -> None:
    chosen, fewer = candidate("fsdp", 424.0, 70.0, nodes=16), candidate("fsdp", 516.0, 70.0, nodes=8)
    assert beside(fewer, chosen) == " against 424 s on 16, 33,024 GPU-seconds against 54,272"
    assert beside(candidate("fsdp", 300.0, 70.0, nodes=16), chosen) == " against 424 s"
