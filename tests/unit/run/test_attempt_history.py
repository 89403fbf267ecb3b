"""The attempts so far decide how the next one starts."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.run.attempt_history import (
    AttemptRecord,
    excluded_nodes,
    failing_nodes,
    idle_attempts,
    load_history,
    next_fallback,
    save_history,
    suspected_nodes,
)
from tests import finished_run


def make_record(step: int = 0, **values: Any) -> AttemptRecord:
    return finished_run.make_record(**{"end": "lost", "checkpoint_step": step} | values)


def drive(steps: list[int]) -> list[AttemptRecord]:
    """Attempts that the driver resumed from without intervention, but for the last, which is still to be answered."""
    return [make_record(step, next_fallback=0) for step in steps[:-1]] + [make_record(step) for step in steps[-1:]]


@pytest.mark.parametrize(("steps", "idle"), [
    ([], 0), ([0], 1), ([5], 0), ([0, 0, 0], 3), ([0, 10], 0), ([0, 10, 10, 10], 2), ([5, 5, 9, 9], 1), ([9, 4], 1),
])  # fmt: skip
def test_idle_attempts(steps: list[int], idle: int) -> None:
    assert idle_attempts(drive(steps)) == idle


@given(st.lists(st.integers(0, 3), max_size=8))
def test_progress_resets_the_count(steps: list[int]) -> None:
    assert 0 <= idle_attempts(drive(steps)) <= len(steps)
    assert idle_attempts(drive([*steps, 4])) == 0


def test_who_starts_again_starts_to_count_again() -> None:
    stopped = drive([5, 5, 5, 5])
    decided = stopped[-1].model_copy(update={"next_fallback": 0})
    assert idle_attempts(stopped) == 3
    assert idle_attempts([*stopped, make_record(5)]) == 1
    assert idle_attempts([*stopped[:-1], decided, make_record(5)]) == 4
    unfit = [make_record(end="preflight failure", next_fallback=0)] * 2
    assert failing_nodes([*unfit, make_record(end="preflight failure")]) == 3
    damaged = make_record(3, end="damaged checkpoint", next_fallback=0)
    assert (
        idle_attempts(
            [*[make_record(5, next_fallback=0)] * 2, damaged, damaged, make_record(3, end="damaged checkpoint")]
        )
        == 1
    )
    assert failing_nodes([*unfit, make_record(), make_record(end="preflight failure")]) == 1


def test_fallbacks() -> None:
    assert next_fallback([], "p") == 0
    assert next_fallback([make_record(next_fallback=1)], "p") == 1
    assert next_fallback([make_record(next_fallback=1), make_record(fallback=1, next_fallback=2)], "p") == 2
    assert next_fallback([make_record(fallback=2)], "p") == 2, "a driver that was killed before it decided"
    assert next_fallback([make_record(fallback=2)], "another plan") == 0


def test_a_preflight_counts_against_a_node_until_somebody_starts_again() -> None:
    unfit = make_record(excluded="c1", end="preflight failure", next_fallback=0)
    lost = [make_record(excluded=node, end="hang", next_fallback=0) for node in ("c1", "c2")]
    assert suspected_nodes([unfit, *lost]) == ["c2"]
    assert suspected_nodes([unfit, make_record(), *lost]) == ["c1", "c2"]


def test_excluded_nodes_are_remembered_once(tmp_path: Path) -> None:
    history = [make_record(excluded=node, next_fallback=0) for node in ("c2", None, "c3", "c2")]
    save_history(tmp_path / "index.json", history)
    assert load_history(tmp_path / "index.json") == history
    assert excluded_nodes(history) == ["c2", "c3"]
    assert excluded_nodes([*history, make_record()]) == [], "whoever starts again has fixed them, or finds them again"
    assert load_history(tmp_path / "none.json") == []
