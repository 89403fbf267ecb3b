"""Undisturbed trainings, and the comparison of trainings with faults with them."""

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from tests.cluster.fault_run import FaultRun

STRATEGIES = ("zero2", "zero3", "fsdp")
Baseline = tuple[dict[int, float], dict[str, Any]]
"""Losses by step, and the final weights."""
Ends = list[set[str]]
"""Possible ends of each attempt."""
Fault = Callable[[FaultRun, int], Ends]
"""Causes a fault in an attempt, given its number, and returns the possible ends."""


class BaselineRuns:
    """Undisturbed trainings, each done once."""

    def __init__(self, run: FaultRun) -> None:
        self._run = run
        self._known: dict[str, Baseline] = {}

    def __call__(self, strategy: str, **changes: Any) -> Baseline:
        """Return the result of a training with ``strategy`` and ``changes``, and configure the run for the next one."""
        run, key = self._run, f"{strategy} {sorted(changes.items())}"
        run.configure(strategy, **changes)
        if key not in self._known:
            run.remove_training()
            run.start()
            assert run.wait() == 0, run.log()
            self._known[key] = run.result(), run.weights()
        run.remove_training()
        return self._known[key]


def assert_equals_baseline(run: FaultRun, baseline: Baseline, tolerance: float = 1e-6) -> None:
    """Compare losses and weights with the baseline."""
    losses, weights = baseline
    assert run.result() == pytest.approx(losses, abs=tolerance)
    found = run.weights()
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.allclose(found[name], tensor, atol=tolerance), name


def recover_from(run: FaultRun, faults: list[Fault], baseline: Baseline, spare: Collection[str] = ()) -> None:
    """Train through one fault after the other without a person; ends in ``spare`` may occur in between."""
    expected: Ends = []
    run.start()
    for fault in faults:
        expected += fault(run, len(expected) + 1)
        run.wait_for_ends(len(expected), fault.__name__)
    assert run.wait() == 0, run.log()
    ends = [end for end in run.ends() if end not in spare]
    assert len(ends) == len(expected) + 1 and ends[-1] == "finished", run.log()
    assert all(seen in allowed for seen, allowed in zip(ends, expected, strict=False)), run.log()
    assert_equals_baseline(run, baseline)
