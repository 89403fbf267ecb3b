"""Model, strategy and hardware to bytes: the peak as a maximum over phases, three figures per GPU, host, NVMe, disk."""

from dataclasses import asdict, dataclass
from typing import Any

from shardmake.plan.buckets import Buckets
from shardmake.plan.hardware import GIB, Hardware
from shardmake.plan.memory import closed, host, states
from shardmake.plan.memory.scenario import Scenario
from shardmake.plan.memory.states import Terms

COMFORT = 1.05  # used memory times this must fit; between it and 1 a candidate is called tight


@dataclass(frozen=True)
class Gpu:
    """Bytes on the fullest rank: tensors, what the allocator holds, what the device shows; terms of the peak phase."""

    allocated: int
    reserved: int
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


def estimate(scenario: Scenario, buckets: Buckets, kept_checkpoints: int = 2) -> Estimate:
    """The memory of ``scenario``."""
    return Estimate(
        gpu=gpu(scenario, buckets),
        host=host.host_terms(scenario, buckets),
        nvme=host.nvme_bytes(scenario),
        disk=host.disk_terms(scenario, kept_checkpoints),
    )


def gpu(scenario: Scenario, buckets: Buckets) -> Gpu:
    """Memory of the fullest rank."""
    all_phases = phases(scenario, buckets)
    name = max(all_phases, key=lambda phase: sum(all_phases[phase].values()))
    terms = all_phases[name]
    allocated = sum(terms.values())
    reserved = int(1.06 * allocated)
    return Gpu(allocated, reserved, reserved + _outside(scenario), name, terms)


def phases(scenario: Scenario, buckets: Buckets) -> dict[str, Terms]:
    """What lives at the peak of each phase."""
    base = states.resident(scenario, buckets)
    grads = states.gradients(scenario)
    held = grads if scenario.accumulation > 1 else {}
    saved, layer, loss = _activations(scenario)
    live = _live(scenario, buckets)
    return {
        "cross entropy": {**base, **held, **live, "activations": saved, "logits and loss": loss},
        "backward": {**base, **grads, **live, "activations": saved, "one layer's backward": layer},
        "optimizer step": {**base, **grads, **states.optimizer_step(scenario, buckets)},
    }


def _activations(scenario: Scenario) -> tuple[int, int, int]:
    """Saved activations, what the backward pass of one layer adds, and the loss."""
    model, shape = scenario.model, scenario.model.decoder
    layers = shape.layers if shape else len(model.blocks)
    per_token = closed.layer_bytes(scenario, shape) if shape else closed.generic_layer_bytes(scenario)
    one = per_token * scenario.tokens
    extra = 2 * scenario.compute * (shape.f if shape else 4 * model.hidden_size) * scenario.tokens
    loss = closed.cross_entropy_bytes(scenario, model.vocab_size)
    if scenario.checkpointing:
        return layers * closed.checkpoint_bytes(scenario, model.hidden_size) * scenario.tokens, one + extra, loss
    return layers * one, extra, loss


def _live(scenario: Scenario, buckets: Buckets) -> Terms:
    """Gathered weights around the turn from forward to backward."""
    model = scenario.model
    if scenario.zero_stage == 3:
        whole = model.parameters
        window = min(whole, buckets.stage3_max_live_parameters, buckets.stage3_max_reuse_distance // 2)
        gathered = min(
            whole, max(window, model.largest_block + model.largest_tensor) + 2 * buckets.stage3_prefetch_bucket_size
        )
        return {"gathered weights": scenario.compute * gathered}
    if scenario.is_fsdp:
        gathered = min(model.parameters, model.outside_blocks + 2 * model.largest_block)
        if scenario.strategy == "fsdp-grad-op":
            gathered = model.parameters
        return {"gathered weights": scenario.compute * gathered}
    if scenario.autocast and not scenario.checkpointing:
        return {"autocast cache": 2 * scenario.split.trainable}
    return {}


def _outside(scenario: Scenario) -> int:
    """What the device shows beyond the allocator."""
    if scenario.on_cpu:
        return 0
    return states.CONTEXT + (states.NCCL if scenario.world_size > 1 else 0)


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
    return True, f"tight: {figures}" if tight else f"fits: {figures}"


def _cpu_verdict(result: Estimate, scenario: Scenario, hardware: Hardware) -> tuple[bool, str]:
    """On CPU the ranks' tensors and the host's share one node's RAM."""
    need = scenario.ranks_per_node * result.gpu.allocated + result.host_total
    figures = f"{need / GIB:.1f} of {hardware.host_memory / GIB:.1f} GiB of a node's RAM"
    if need > hardware.host_memory:
        return False, f"needs {figures}"
    return True, f"fits: {figures}"
