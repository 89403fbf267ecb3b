"""The verdict on an estimate: whether it fits, and whether its margin covers the estimator's own error."""

from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple

from shardmake.core.units import GIB
from shardmake.memory.estimate import Estimate
from shardmake.memory.hardware import Hardware
from shardmake.memory.scenario import Scenario
from shardmake.memory.trace import failure

# The estimator's own error by family of training: what published runs needed beyond their estimates.
#
# The figures come from the fully specified rows (grades A and A-) of ``benchmarks/results/memory_accuracy.txt``. A
# test computes them from that file again, so that they follow the benchmark. A family of fewer than ten runs has at
# least the errors of all runs: so few say little about the next one.

FEW: Final = 10
"""A family of fewer runs has at least the errors of all runs."""


class FamilyError(NamedTuple):
    """The errors of the estimates of one family; shares of the estimate, which a margin has to cover."""

    name: str
    """The family in messages: ``NAME trainings``."""
    runs: int
    """Published runs."""
    typical: float
    """Median of the absolute errors; see the module for small families."""
    largest: float
    """Nineteen in twenty runs needed at most this much more than estimated."""

    @property
    def sample(self) -> str:
        """The runs behind the figures, in messages."""
        return f"{self.runs} published runs" + (", or that of all if larger" if self.runs < FEW else "")


FAMILY_ERRORS: Final[dict[str, FamilyError]] = {
    "unsharded": FamilyError("unsharded", 14, 0.0161, 0.1351),
    "sharded": FamilyError("sharded", 14, 0.0417, 0.1481),
    "quantized": FamilyError("quantized", 4, 0.0263, 0.1351),
    "offloaded": FamilyError("offloaded", 3, 0.0341, 0.1351),
}
"""By family. Offload counts before quantization, quantization before sharding."""


STAND_IN: Final = FamilyError("not traced", 0, 0.25, 0.5)
"""Of steps that could not be traced (`shardmake.memory.stand_in`); no published run is behind the figures."""


def error_of(scenario: Scenario) -> FamilyError:
    """Return the error of the estimates of trainings like ``scenario``."""
    if failure(scenario):
        return STAND_IN
    if scenario.offloads_optimizer or scenario.offloads_parameters:
        return FAMILY_ERRORS["offloaded"]
    if scenario.method_spec.in_four_bits:
        return FAMILY_ERRORS["quantized"]
    return FAMILY_ERRORS["unsharded" if scenario.spec.is_ddp else "sharded"]


NO_LIMIT: Final = 2**62
"""Bytes of host RAM where ``shardmake estimate`` has no ``--host-memory``."""


class Headroom(IntEnum):
    """How much more GPU memory a candidate may need than estimated and still fit."""

    LITTLE = 0
    """Less than the typical error of its family."""
    TIGHT = 1
    """The typical error of its family, but not that of nineteen in twenty runs."""
    ENOUGH = 2
    """The error of nineteen in twenty runs."""


class Verdict(NamedTuple):
    """The verdict on one candidate: the figures as text, and its headroom."""

    fits: bool
    reason: str
    """Without a subject: ``fits: ...``, ``tight: ...``, ``needs ...``."""
    headroom: Headroom


def judge(
    memory: Estimate,
    scenario: Scenario,
    hardware: Hardware,
    error: FamilyError,
    device_on: Callable[[int], int],
) -> Verdict:
    """Return the verdict on ``memory``.

    ``device_on`` returns the device memory in bytes on a GPU of that many bytes. The allocator holds less where there
    is less, so the margin is found on a smaller GPU, and not from the memory that it holds on this one.
    """
    if hardware.is_cpu:
        return _judge_cpu(memory, scenario, hardware)
    for need, room, what in (
        (memory.gpu.device, hardware.gpu_memory, "GPU memory"),
        (memory.host_total, hardware.host_memory, "host RAM of a node"),
        (sum(memory.nvme.values()), hardware.nvme, "NVMe of a node"),
    ):
        if need and room is None:
            return Verdict(False, "needs node-local NVMe; set nvme_path in the cluster file", Headroom.LITTLE)
        if room is not None and need > room:
            return Verdict(
                False, f"needs {need / GIB:.1f} GiB of {what}, {room / GIB:.1f} GiB available", Headroom.LITTLE
            )
    headroom = _headroom(memory, hardware.gpu_memory, error, device_on)
    figures = f"{memory.gpu.device / GIB:.1f} of {hardware.gpu_memory / GIB:.1f} GiB per GPU"
    if memory.gpu.wanted > memory.gpu.reserved:
        without = memory.gpu.device + memory.gpu.wanted - memory.gpu.reserved
        figures += f" ({without / GIB:.1f} GiB if PyTorch's cache had no limit)"
    return Verdict(True, f"{'fits' if headroom == Headroom.ENOUGH else 'tight'}: {figures}", headroom)


def _headroom(memory: Estimate, capacity: int, error: FamilyError, device_on: Callable[[int], int]) -> Headroom:
    for share, headroom in ((error.largest, Headroom.ENOUGH), (error.typical, Headroom.TIGHT)):
        smaller = int(capacity / (1 + share))
        if memory.gpu.device <= smaller or device_on(smaller) <= smaller:
            return headroom
    return Headroom.LITTLE


def _judge_cpu(memory: Estimate, scenario: Scenario, hardware: Hardware) -> Verdict:
    """Return the verdict on CPU, where the tensors of the ranks share the node's RAM with the host's."""
    need = scenario.ranks_per_node * memory.gpu.reserved + memory.host_total
    limit = "" if hardware.host_memory >= NO_LIMIT else f" of {hardware.host_memory / GIB:.1f}"
    figures = f"{need / GIB:.1f}{limit} GiB of a node's RAM"
    if need > hardware.host_memory:
        return Verdict(False, f"needs {figures}", Headroom.LITTLE)
    return Verdict(True, f"fits: {figures}", Headroom.ENOUGH)
