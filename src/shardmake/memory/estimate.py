"""The memory estimate of one candidate: GPU (the peak over phases), host RAM, NVMe and disk."""

from typing import ClassVar

from shardmake.memory import closed_form, host, states
from shardmake.memory.buckets import Buckets
from shardmake.memory.ddp import DdpMemory, StepEvents, StepParts, parts_of, replay
from shardmake.memory.fsdp import Fsdp2Memory
from shardmake.memory.scenario import Scenario
from shardmake.memory.timeline import Timeline
from shardmake.memory.trace import events_of
from shardmake.memory.zero import Zero3Memory, Zero12Memory
from shardmake.run.plan import GpuEstimate, PlaceEstimate
from shardmake.run.record import RunRecord


class Estimate(RunRecord):
    """The memory of one candidate; host RAM and NVMe are per node, the disk is the total."""

    made_by: ClassVar[str] = "shardmake estimate MODEL"
    gpu: GpuEstimate
    host: PlaceEstimate
    nvme: PlaceEstimate
    disk: PlaceEstimate


def estimate_closed_form(
    scenario: Scenario, buckets: Buckets, activations: closed_form.Profile, kept: int = 2
) -> Estimate:
    """Return the estimate in closed form."""
    by_phase = closed_form.phases(scenario, buckets, activations)
    phase = max(by_phase, key=lambda name: sum(by_phase[name].values()))
    terms = {term: size for term, size in by_phase[phase].items() if size}
    allocated = sum(terms.values())
    reserved = allocated if scenario.on_cpu else int(closed_form.RESERVED_SHARE * allocated)
    sizes = {"allocated": allocated, "reserved": reserved, "wanted": reserved, "device": reserved + outside(scenario)}
    return whole(scenario, buckets, GpuEstimate(**sizes, phase=phase, terms=terms), kept)


def whole(scenario: Scenario, buckets: Buckets, gpu: GpuEstimate, kept: int) -> Estimate:
    """Return the estimate with ``gpu``, and the disk for ``kept`` checkpoints."""
    places = {
        "host": host.host_terms(scenario, buckets),
        "nvme": host.nvme_bytes(scenario),
        "disk": host.disk_terms(scenario, kept),
    }
    return Estimate(gpu=gpu, **{name: PlaceEstimate(total=sum(t.values()), terms=t) for name, t in places.items()})


def gpu_memory(
    scenario: Scenario, buckets: Buckets, events: StepEvents | None = None, capacity: int | None = None
) -> GpuEstimate:
    """Return the memory of the fullest rank from a simulated step, on a device of ``capacity`` bytes."""
    return memory_of(scenario, simulate(scenario, buckets, step_of(scenario, events)), capacity)


def step_of(scenario: Scenario, events: StepEvents | None = None) -> StepParts:
    """Return the micro step of ``scenario`` from its ``events``, for `simulate`."""
    return parts_of(events or events_of(scenario), len(scenario.model.blocks) - 1)


def memory_of(scenario: Scenario, timeline: Timeline, capacity: int | None = None) -> GpuEstimate:
    """Return the memory of the fullest rank from its ``timeline``, on a device of ``capacity`` bytes.

    On a smaller device than it wants, the allocator releases unused segments before it takes a new one. If the tensors
    alone exceed the device, what it would hold besides is not looked for.
    """
    phase = timeline.highest()
    peak, beside = timeline.peaks[phase], outside(scenario)
    limit = None if capacity is None or scenario.on_cpu else capacity - beside
    if limit is not None and peak.total > limit:
        wanted = reserved = peak.total
    else:
        wanted = reserved = timeline.resident() if scenario.on_cpu else timeline.reserved()
        if limit is not None and limit < wanted:
            reserved = timeline.reserved(limit)
    sizes = {"allocated": peak.total, "reserved": reserved, "wanted": wanted, "device": reserved + beside}
    return GpuEstimate(**sizes, phase=phase, terms=peak.terms)


def simulate(scenario: Scenario, buckets: Buckets, step: StepParts) -> Timeline:
    """Simulate two optimizer steps, the second with up to two micro steps; the first micro steps of both are alike."""
    whole, timeline, last = Timeline(), Timeline(), len(scenario.model.blocks) - 1
    memory = rank_memory(scenario, buckets, timeline)
    memory.load()
    timeline.enter("load")
    whole.repeat(timeline.cut())
    replay(step, memory, timeline, last)
    first, live, gradients = timeline.cut(), {**timeline.live}, {**memory.gradients}
    for micro_steps in (1, min(scenario.accumulation, 2)):
        whole.repeat(first)
        timeline.live.update(live)
        memory.gradients.update(gradients)
        for _ in range(micro_steps - 1):
            replay(step, memory, timeline, last)
        timeline.enter("optimizer step")
        memory.step()
        whole.repeat(timeline.cut())
    return whole


def rank_memory(scenario: Scenario, buckets: Buckets, timeline: Timeline) -> DdpMemory:
    """Return the memory of one rank as the library of ``scenario`` shards it."""
    if scenario.spec.is_fsdp:
        return Fsdp2Memory(scenario, buckets, timeline)
    by_stage = (DdpMemory, Zero12Memory, Zero12Memory, Zero3Memory)
    return by_stage[scenario.spec.zero_stage](scenario, buckets, timeline)


def outside(scenario: Scenario) -> int:
    """Return the bytes on the device outside the allocator."""
    if scenario.on_cpu:
        return 0
    groups = sum(ranks > 1 for ranks in (scenario.world_size // scenario.tensor_parallel, scenario.tensor_parallel))
    measured, context, nccl = scenario.calibration, states.context_bytes(scenario.gpu_capability), states.NCCL
    if measured is not None:
        nccl = nccl if measured.nccl is None else measured.nccl
        context = measured.context + (measured.pools if scenario.spec.gathers_parameters else 0)
    communicators = nccl * groups
    if not groups and scenario.checks_network:  # those of the check and of the library exist for one rank, too
        communicators = states.NCCL_OF_ONE_RANK + (states.ZERO_OF_ONE_RANK if scenario.spec.zero_stage in (1, 2) else 0)
    return context + communicators
