"""Trainings that something is done to, and what each must end as: the one that was left in peace."""

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from tests.cluster.lab import FaultLab

STRATEGIES = ("zero2", "zero3", "fsdp")
Calm = tuple[dict[int, float], dict[str, Any]]
"""Losses by step, and the final weights."""
Ends = list[set[str]]
"""What may end each attempt."""
Fault = Callable[[FaultLab, int], Ends]
"""Does something to attempt number so and so of a training under way, and names the ends it may lead to."""


class Peace:
    """Undisturbed trainings, each done once."""

    def __init__(self, lab: FaultLab) -> None:
        self._lab = lab
        self._known: dict[str, Calm] = {}

    def __call__(self, strategy: str, **changes: Any) -> Calm:
        """What a training with ``strategy`` and ``changes`` comes to; the lab is ready for the next one with it."""
        lab, key = self._lab, f"{strategy} {sorted(changes.items())}"
        lab.configure(strategy, **changes)
        if key not in self._known:
            lab.forget()
            lab.start()
            assert lab.wait() == 0, lab.log()
            self._known[key] = lab.result(), lab.weights()
        lab.forget()
        return self._known[key]


def assert_as_in_peace(lab: FaultLab, calm: Calm, tolerance: float = 1e-6) -> None:
    """The same losses, no step twice, and the same weights."""
    losses, weights = calm
    assert lab.result() == pytest.approx(losses, abs=tolerance)
    found = lab.weights()
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.allclose(found[name], tensor, atol=tolerance), name


def survive(lab: FaultLab, faults: list[Fault], calm: Calm, spare: Collection[str] = ()) -> None:
    """One training, one fault after the other, no person needed; ends in ``spare`` may come in between."""
    expected: Ends = []
    lab.start()
    for fault in faults:
        expected += fault(lab, len(expected) + 1)
        lab.wait_for_ends(len(expected), fault.__name__)
    assert lab.wait() == 0, lab.log()
    ends = [end for end in lab.ends() if end not in spare]
    assert len(ends) == len(expected) + 1 and ends[-1] == "finished", lab.log()
    assert all(seen in allowed for seen, allowed in zip(ends, expected, strict=False)), lab.log()
    assert_as_in_peace(lab, calm)
