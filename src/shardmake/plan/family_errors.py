"""The estimator's own error by family of training: what published runs needed beyond their estimates.

The figures come from the fully specified rows (grades A and A-) of ``benchmarks/results/memory_accuracy.txt``. A test
computes them from that file again, so that they follow the benchmark. A family of fewer than ten runs has at least the
errors of all runs: so few say little about the next one.
"""

from typing import Final, NamedTuple

from shardmake.memory.scenario import Scenario

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


def error_of(scenario: Scenario) -> FamilyError:
    """Return the error of the estimates of trainings like ``scenario``."""
    if scenario.offloads_optimizer or scenario.offloads_parameters:
        return FAMILY_ERRORS["offloaded"]
    if scenario.method == "qlora":
        return FAMILY_ERRORS["quantized"]
    return FAMILY_ERRORS["unsharded" if scenario.spec.is_ddp else "sharded"]
