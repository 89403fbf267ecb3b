"""Model, strategy and hardware to bytes: the peak as a maximum over phases, three figures per GPU, host, NVMe, disk."""

from dataclasses import asdict, dataclass
from typing import Any

from shardmake.core.units import GIB
from shardmake.memory import closed_form, host, states
from shardmake.memory.buckets import Buckets
from shardmake.memory.decoder import micro_step
from shardmake.memory.engines import make_engine
from shardmake.memory.events import StepEvents, replay
from shardmake.memory.hardware import Hardware
from shardmake.memory.scenario import Scenario
from shardmake.memory.states import Terms
from shardmake.memory.timeline import Timeline
from shardmake.memory.trace import scaled

COMFORT = 1.05  # used memory times this must fit; between it and 1 a candidate is called tight


@dataclass(frozen=True)
class Gpu:
    """Bytes on the fullest rank: tensors, what the allocator holds, what the device shows; terms of the peak phase.

    ``wanted`` is what the allocator would hold on a device without end. Where that is more than the device has, it
    gives unused segments back before it takes a new one, and ``reserved`` is what it holds at most then.
    """

    allocated: int
    reserved: int
    wanted: int
    device: int
    phase: str
    terms: Terms


@dataclass(frozen=True)
class Estimate:
    """All the memory of one candidate; ``host``, ``nvme`` per node, ``disk`` over all."""

    gpu: Gpu
    host: Terms
    nvme: Terms
    disk: Terms

    @property
    def host_total(self) -> int:
        """Host RAM of a node."""
        return sum(self.host.values())

    def as_json(self) -> dict[str, Any]:
        """Bytes, term by term."""
        return {
            "gpu": asdict(self.gpu),
            "host": {"total": self.host_total, "terms": self.host},
            "nvme": {"total": sum(self.nvme.values()), "terms": self.nvme},
            "disk": {"total": sum(self.disk.values()), "terms": self.disk},
        }


def from_json(values: dict[str, Any]) -> Estimate:
    """The estimate that `Estimate.as_json` wrote."""
    return Estimate(Gpu(**values["gpu"]), *(values[place]["terms"] for place in ("host", "nvme", "disk")))


def estimate_closed_form(
    scenario: Scenario, buckets: Buckets, activations: closed_form.Profile, kept: int = 2
) -> Estimate:
    """The estimate in closed form."""
    by_phase = closed_form.phases(scenario, buckets, activations)
    phase = max(by_phase, key=lambda name: sum(by_phase[name].values()))
    terms = {term: size for term, size in by_phase[phase].items() if size}
    allocated = sum(terms.values())
    reserved = allocated if scenario.on_cpu else int(closed_form.RESERVED_SHARE * allocated)
    figures = Gpu(allocated, reserved, reserved, reserved + outside(scenario), phase, terms)
    return _estimate(scenario, buckets, figures, kept)


def estimate_simulated(
    scenario: Scenario, buckets: Buckets, script: StepEvents, kept: int = 2, capacity: int | None = None
) -> Estimate:
    """The estimate with the step acted out and the allocator's model."""
    return _estimate(scenario, buckets, gpu(scenario, buckets, script, capacity), kept)


def _estimate(scenario: Scenario, buckets: Buckets, figures: Gpu, kept: int) -> Estimate:
    return Estimate(
        gpu=figures,
        host=host.host_terms(scenario, buckets),
        nvme=host.nvme_bytes(scenario),
        disk=host.disk_terms(scenario, kept),
    )


def gpu(scenario: Scenario, buckets: Buckets, script: StepEvents | None = None, capacity: int | None = None) -> Gpu:
    """Memory of the fullest rank, acted out allocation by allocation, on a device of ``capacity`` bytes."""
    timeline = simulate(scenario, buckets, script or events_of(scenario))
    phase = timeline.highest()
    peak = timeline.peaks[phase]
    wanted = reserved = timeline.resident() if scenario.on_cpu else timeline.reserved()
    limit = capacity - outside(scenario) if capacity is not None and not scenario.on_cpu else wanted
    if peak.total <= limit < wanted:
        reserved = timeline.reserved(limit)
    return Gpu(peak.total, reserved, wanted, reserved + outside(scenario), phase, peak.terms)


def events_of(scenario: Scenario) -> StepEvents:
    """The micro step in closed form where the family is known, else traced."""
    return micro_step(scenario) if scenario.model.decoder else scaled(scenario)


def simulate(scenario: Scenario, buckets: Buckets, script: StepEvents) -> Timeline:
    """Two optimizer steps, the second with up to two micro steps: it is like all that follow."""
    timeline = Timeline()
    engine = make_engine(scenario, buckets, timeline)
    engine.load()
    timeline.enter("load")
    for micro_steps in (1, min(scenario.accumulation, 2)):
        for _ in range(micro_steps):
            replay(script, engine, timeline, last_block(scenario))
        timeline.enter("optimizer step")
        engine.step()
    return timeline


def last_block(scenario: Scenario) -> int:
    """Index of the last layer."""
    return len(scenario.model.blocks) - 1


def outside(scenario: Scenario) -> int:
    """What the device shows beyond the allocator."""
    if scenario.on_cpu:
        return 0
    talks = scenario.world_size > 1 and scenario.stack.nccl
    measured = scenario.calibration
    if measured is None:
        return states.CONTEXT + (states.NCCL if talks else 0)
    nccl = states.NCCL if measured.nccl is None else measured.nccl
    return measured.context + (nccl if talks else 0) + (measured.pools if scenario.gathers_parameters else 0)


def verdict(result: Estimate, scenario: Scenario, hardware: Hardware) -> tuple[bool, str]:
    """Whether ``result`` fits, and a sentence with the figures."""
    if hardware.is_cpu:
        return _cpu_verdict(result, scenario, hardware)
    for need, room, what in (
        (result.gpu.device, hardware.gpu_memory, "GPU memory"),
        (result.host_total, hardware.host_memory, "host RAM of a node"),
        (sum(result.nvme.values()), hardware.nvme, "NVMe of a node"),
    ):
        if need and room is None:
            return False, "needs node-local NVMe; set nvme_path in the cluster file"
        if room is not None and need > room:
            return False, f"needs {need / GIB:.1f} GiB of {what}, there are {room / GIB:.1f}"
    tight = result.gpu.device * COMFORT > hardware.gpu_memory
    figures = f"{result.gpu.device / GIB:.1f} of {hardware.gpu_memory / GIB:.1f} GiB per GPU"
    if result.gpu.wanted > result.gpu.reserved:
        figures += (
            f", where PyTorch's cache gives back what it has beyond (it would grow to {result.gpu.wanted / GIB:.1f})"
        )
    return True, f"tight: {figures}" if tight else f"fits: {figures}"


def _cpu_verdict(result: Estimate, scenario: Scenario, hardware: Hardware) -> tuple[bool, str]:
    """On CPU the ranks' tensors and the host's share one node's RAM."""
    need = scenario.ranks_per_node * result.gpu.reserved + result.host_total
    figures = f"{need / GIB:.1f} of {hardware.host_memory / GIB:.1f} GiB of a node's RAM"
    if need > hardware.host_memory:
        return False, f"needs {figures}"
    return True, f"fits: {figures}"
