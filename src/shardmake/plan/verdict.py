"""The verdict on an estimate: whether it fits, and whether its margin covers the estimator's own error."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from shardmake.core.units import GIB
from shardmake.memory.estimate import Estimate
from shardmake.memory.hardware import Hardware
from shardmake.memory.scenario import Scenario
from shardmake.memory.trace import failure

# The estimator's own error by family of training: what published runs needed beyond their estimates.
#
# The figures come from the fully specified rows (grades A and A-) of ``memory_accuracy.txt``, ``memory_held_out.txt``
# and ``memory_second.txt`` in ``benchmarks/results``. A test computes them from these files again, so that they follow
# the benchmark. A family has at least the errors of all runs: its own are few, and say little about other machines.


class FamilyError(NamedTuple):
    """The errors of the estimates of one family; shares of the estimate, which a margin has to cover."""

    name: str
    """The family in messages: ``estimates of NAME trainings``."""
    runs: int
    """Published runs."""
    typical: float
    """Median of the absolute errors."""
    largest: float
    """Nineteen in twenty runs needed at most this much more than estimated."""

    @property
    def sample(self) -> str:
        """The runs behind the figures, in messages."""
        return f"{self.runs} measured runs, or that of all if larger"


FAMILY_ERRORS: Final[dict[str, FamilyError]] = {
    "unsharded": FamilyError("unsharded", 39, 0.0173, 0.0977),
    "sharded": FamilyError("sharded", 39, 0.0310, 0.0905),
    "quantized": FamilyError("quantized", 56, 0.0173, 0.0650),
    "offloaded": FamilyError("offloaded", 3, 0.0341, 0.0650),
}
"""By family. Offload counts before quantization, quantization before sharding."""
HOST_ERROR: Final = FamilyError("host RAM in", 8, 0.0645, 0.0953)
"""Of the RAM of a node; its rows are the trainings of ``benchmarks/results/memory_cpu.txt``."""


STAND_IN: Final = FamilyError("not traced", 0, 0.25, 0.5)
"""Of steps that could not be traced (`shardmake.memory.stand_in`); no published run is behind the figures."""


def error_of(scenario: Scenario) -> FamilyError:
    """Return the error of the estimates of trainings like ``scenario``."""
    if failure(scenario):
        return STAND_IN
    if scenario.spec.offload_optimizer or scenario.spec.offload_param:
        return FAMILY_ERRORS["offloaded"]
    if scenario.method_spec.in_four_bits:
        return FAMILY_ERRORS["quantized"]
    return FAMILY_ERRORS["unsharded" if scenario.spec.is_ddp else "sharded"]


_CACHE: Final = 0.05
"""Part of the memory from which on a message gives the range that PyTorch's cache makes.

It gives the range too if the margin counts on it.
"""
NO_LIMIT: Final = 2**62
"""Bytes of host RAM where ``shardmake estimate`` has no ``--host-memory``."""


class Headroom(IntEnum):
    """How much more memory a candidate may need than estimated and still fit: the least of GPU memory and host RAM."""

    LITTLE = 0
    """Less than the typical error of its family."""
    TENSORS = 1
    """The error of nineteen in twenty runs for its tensors, but not the typical one for what the cache may hold."""
    TIGHT = 2
    """The typical error of its family, but not that of nineteen in twenty runs."""
    ENOUGH = 3
    """The error of nineteen in twenty runs."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one candidate: the figures as text, and its headroom."""

    fits: bool
    """In every place."""
    reason: str
    """Why it fits or not, without a subject: ``fits: ...``, ``tight: ...``, ``needs ...``."""
    headroom: Headroom
    error: FamilyError
    """The error that the headroom is measured with."""


def judge(
    memory: Estimate, scenario: Scenario, hardware: Hardware, error: FamilyError, device_on: Callable[[int], int]
) -> Verdict:
    """Return the verdict on ``memory``.

    ``device_on`` returns the device memory in bytes on a GPU of that many bytes. The allocator holds less where there
    is less, so the margin is found on a smaller GPU, and not from the memory that it holds on this one. How much of its
    cache it cannot give back is a range, which begins at the tensors: only what exceeds the GPU with those is refused.
    Ranks run with expandable segments, which give back most of the cache.
    """
    if hardware.is_cpu:
        return _judge_cpu(memory, scenario, hardware)
    gpu, least = memory.gpu, memory.gpu.device - memory.gpu.reserved + memory.gpu.allocated
    for need, room, what in (
        (least, hardware.gpu_memory, "GPU memory" + " while the model loads" * (gpu.phase == "load")),
        (memory.host.total, hardware.host_memory, "host RAM of a node"),
        (memory.nvme.total, hardware.nvme, "NVMe of a node"),
    ):
        if need and (room is None or need > room):
            reason = "needs node-local NVMe; set nvme_path in the cluster file"
            if room is not None:
                reason = f"needs {need / GIB:.1f} GiB of {what}, {room / GIB:.1f} GiB available"
            return Verdict(False, reason, Headroom.LITTLE, error)
    headroom = _headroom(
        hardware.gpu_memory, error, lambda room: gpu.device <= room or (least <= room and device_on(room) <= room)
    )
    if headroom == Headroom.LITTLE and least * (1 + error.largest) <= hardware.gpu_memory:
        headroom = Headroom.TENSORS
    figures = f"{gpu.device / GIB:.1f} of {hardware.gpu_memory / GIB:.1f} GiB per GPU"
    covered = error.largest if headroom == Headroom.ENOUGH else error.typical
    if gpu.device * (1 + covered) > hardware.gpu_memory or least < (1 - _CACHE) * gpu.device:
        figures = f"{least / GIB:.1f} to {figures}"
    host = _headroom(hardware.host_memory, HOST_ERROR, lambda room: memory.host.total <= room)
    if host < headroom:
        headroom, error = host, HOST_ERROR
        figures += f", {memory.host.total / GIB:.1f} of {hardware.host_memory / GIB:.1f} GiB of a node's RAM"
    return _fitting(figures, headroom, error)


def _fitting(figures: str, headroom: Headroom, error: FamilyError) -> Verdict:
    return Verdict(True, f"{'fits' if headroom == Headroom.ENOUGH else 'tight'}: {figures}", headroom, error)


def _headroom(room: int, error: FamilyError, fits_in: Callable[[int], bool]) -> Headroom:
    margins = ((error.largest, Headroom.ENOUGH), (error.typical, Headroom.TIGHT))
    return next((found for share, found in margins if fits_in(int(room / (1 + share)))), Headroom.LITTLE)


def _judge_cpu(memory: Estimate, scenario: Scenario, hardware: Hardware) -> Verdict:
    """Return the verdict on CPU, where the tensors of the ranks share the node's RAM with the host's."""
    need = scenario.ranks_per_node * memory.gpu.reserved + memory.host.total
    limit = "" if hardware.host_memory >= NO_LIMIT else f" of {hardware.host_memory / GIB:.1f}"
    figures = f"{need / GIB:.1f}{limit} GiB of a node's RAM"
    if need > hardware.host_memory:
        return Verdict(False, f"needs {figures}", Headroom.LITTLE, HOST_ERROR)
    return _fitting(figures, _headroom(hardware.host_memory, HOST_ERROR, lambda room: need <= room), HOST_ERROR)
