"""Undisturbed trainings, and the comparison of trainings with faults with them."""

import re
import time
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from tests.cluster.fault_run import FaultRun
from tools.fault_matrix import EXACT

Baseline = tuple[dict[int, float], dict[str, Any]]
"""Losses by step, and the final weights."""
Ends = list[set[str]]
"""Possible ends of each attempt."""
Fault = Callable[[FaultRun, int], Ends]
"""Causes a fault in an attempt, given its number, and returns the possible ends."""
tolerances: list[float] = []
"""Of the comparisons that the running test has made, for its report."""
caused: dict[str, float] = {}
"""Seconds of each fault of the running test until its end, for its report."""


class BaselineRuns:
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


def assert_equals_baseline(run: FaultRun, baseline: Baseline, tolerance: float = EXACT) -> None:
    assert_equal((run.result(), run.weights()), baseline, tolerance)


def assert_equal(found: Baseline, expected: Baseline, tolerance: float) -> None:
    """Compare losses and weights, and let the report of the test say so."""
    losses, weights = expected
    assert found[0] == pytest.approx(losses, abs=tolerance)
    assert found[1].keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.allclose(found[1][name], tensor, atol=tolerance, rtol=0), name
    tolerances.append(tolerance)


def recover_from(run: FaultRun, faults: list[Fault], baseline: Baseline, spare: Collection[str] = ()) -> None:
    """Train through one fault after the other without a person; ends in ``spare`` may occur in between."""
    expected: Ends = []
    run.start()
    for fault in faults:
        started = time.monotonic()
        run.slow(2)  # the training must not end while a busy machine causes the fault
        expected += fault(run, len(expected) + 1)
        run.wait_for_ends(len(expected), fault.__name__, spare)
        run.cluster.repair_nodes()  # as the site's staff would do in the end
        caused[fault.__name__] = time.monotonic() - started
    run.slow(0)
    assert run.wait() == 0, run.log()
    ends = [end for end in run.ends() if end not in spare]
    assert len(ends) == len(expected) + 1 and ends[-1] == "finished", run.log()
    assert all(seen in allowed for seen, allowed in zip(ends, expected, strict=False)), run.log()
    printed = "\n".join([run.log(), *(record["message"] for record in run.history())])
    assert [pattern for pattern in run.expected if not re.search(pattern, printed)] == [], printed
    assert_equals_baseline(run, baseline)
