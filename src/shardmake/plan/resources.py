"""Memory and cores that each stage requests from Slurm."""

from shardmake.core.units import GIB
from shardmake.memory.hardware import Hardware
from shardmake.memory.scenario import BYTES
from shardmake.plan.candidates import Candidate
from shardmake.plan.resolve import ResolvedRun
from shardmake.run.plan import Fallback, Resources


def resources(settings: ResolvedRun, chosen: Candidate) -> dict[str, Resources]:
    """Return memory and cores per node by stage, with a quarter of headroom, at most those of a node."""
    hardware, model = settings.hardware, settings.model
    weights = BYTES[settings.precision] * model.parameters
    largest = 4 * model.largest_tensor
    few = min(4, hardware.cpus_per_node)
    return {
        "train": _resources(hardware, host_need(chosen, hardware), hardware.cpus_per_node),
        "consolidate": _resources(hardware, 2 * GIB + 4 * largest, few),
        "evaluate": _resources(hardware, 3 * GIB + (4 * model.parameters if hardware.is_cpu else 2 * weights), few),
        "data": _resources(hardware, 4 * GIB, few),
    }


def as_fallback(candidate: Candidate, hardware: Hardware) -> Fallback:
    """Return ``candidate`` as it is written to the plan."""
    need = host_need(candidate, hardware)
    asked = _resources(hardware, need, hardware.cpus_per_node)
    return Fallback(choice=candidate.choice, host_memory=need, memory_gib=asked.memory_gib)


def host_need(candidate: Candidate, hardware: Hardware) -> int:
    """Return the host RAM per node in bytes; without GPUs it holds all tensors."""
    tensors = candidate.choice.processes_per_node * candidate.memory.gpu.reserved if hardware.is_cpu else 0
    return candidate.memory.host_total + tensors


def _resources(hardware: Hardware, needed: int, cpus: int) -> Resources:
    gib = -(-int(1.25 * needed) // GIB)
    return Resources(memory_gib=max(1, min(gib, hardware.host_memory // GIB)), cpus=cpus)
