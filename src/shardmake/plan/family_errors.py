"""The estimator's own error by family of training: how far it was from published measurements.

The figures come from the fully specified rows (grades A and A-) of ``benchmarks/results/memory_accuracy.txt``. A test
computes them from that file again, so that they follow the benchmark. A family of fewer than ten runs has at least the
errors of all runs: so few say little about the next one.
"""

from typing import Final, NamedTuple

from shardmake.memory.scenario import Scenario


class FamilyError(NamedTuple):
    """The errors of the estimates of one family; shares of the measured memory."""

    name: str
    """The family in messages: ``NAME trainings``."""
    runs: int
    """Published runs."""
    typical: float
    """Median of the absolute errors; see the module for small families."""
    largest: float
    """Nine in ten runs needed at most this much more than estimated."""


FAMILY_ERRORS: Final[dict[str, FamilyError]] = {
    "unsharded": FamilyError("unsharded", 14, 0.0245, 0.089),
    "sharded": FamilyError("sharded", 14, 0.0475, 0.083),
    "quantized": FamilyError("quantized", 4, 0.039, 0.089),
    "offloaded": FamilyError("offloaded", 3, 0.058, 0.288),
}
"""By family. Offload counts before quantization, quantization before sharding."""


def error_of(scenario: Scenario) -> FamilyError:
    """Return the error of the estimates of trainings like ``scenario``."""
    if scenario.offloads_optimizer or scenario.offloads_parameters:
        return FAMILY_ERRORS["offloaded"]
    if scenario.method == "qlora":
        return FAMILY_ERRORS["quantized"]
    return FAMILY_ERRORS["unsharded" if scenario.spec.is_ddp else "sharded"]
