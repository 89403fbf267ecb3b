"""The machine that a result of a benchmark names."""

import pytest

from benchmarks import machine
from shardmake.core.environment import LIBRARIES, checkout_commit


def test_the_commit_is_that_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that a benchmark has written since then does not make it dirty."""
    commit = machine._COMMIT
    monkeypatch.setattr(machine, "checkout_commit", lambda: "later-dirty")
    found = machine.machine(before=(1.0, 2.0, 3.0))
    assert found["commit"] == commit and commit and commit.removesuffix("-dirty") == str(checkout_commit())[:12]
    assert found["load_before"] == (1.0, 2.0, 3.0) and found["versions"].keys() <= set(LIBRARIES)
