"""What the attempts so far mean for the next."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.run.attempt_history import (
    Chapter,
    excluded_nodes,
    idle_attempts,
    next_rung,
    read_story,
    unfit_nodes,
    write_story,
)


def chapter(step: int = 0, **values: object) -> Chapter:
    base: dict[str, object] = dict(
        attempt=1, job="1", plan="p", strategy="zero3", rung=0, submitted=0.0, ended=1.0, end="lost", sentence="", host=None,
        checkpoint_step=step,
    )  # fmt: skip
    return Chapter.model_validate(base | values)


def drive(steps: list[int]) -> list[Chapter]:
    """Attempts that the driver went on from by itself, but for the last, which is still to be answered."""
    return [chapter(step, next_rung=0) for step in steps[:-1]] + [chapter(step) for step in steps[-1:]]


@pytest.mark.parametrize(
    ("steps", "idle"),
    [([], 0), ([0], 1), ([5], 0), ([0, 0, 0], 3), ([0, 10], 0), ([0, 10, 10, 10], 2), ([5, 5, 9, 9], 1), ([9, 4], 1)],
)
def test_idle_attempts(steps: list[int], idle: int) -> None:
    assert idle_attempts(drive(steps)) == idle


@given(st.lists(st.integers(0, 3), max_size=8))
def test_progress_resets_the_count(steps: list[int]) -> None:
    assert 0 <= idle_attempts(drive(steps)) <= len(steps)
    assert idle_attempts(drive([*steps, 4])) == 0


def test_who_starts_again_starts_to_count_again() -> None:
    stopped = drive([5, 5, 5, 5])
    decided = stopped[-1].model_copy(update={"next_rung": 0})
    assert idle_attempts(stopped) == 3
    assert idle_attempts([*stopped, chapter(5)]) == 1
    assert idle_attempts([*stopped[:-1], decided, chapter(5)]) == 4
    unfit = [chapter(end="preflight failure", next_rung=0)] * 2
    assert unfit_nodes([*unfit, chapter(end="preflight failure")]) == 3
    assert unfit_nodes([*unfit, chapter(), chapter(end="preflight failure")]) == 1


def test_rungs() -> None:
    assert next_rung([], "p") == 0
    assert next_rung([chapter(next_rung=1)], "p") == 1
    assert next_rung([chapter(next_rung=1), chapter(rung=1, next_rung=2)], "p") == 2
    assert next_rung([chapter(rung=2)], "p") == 2, "a driver that died before it decided"
    assert next_rung([chapter(rung=2)], "another plan") == 0


def test_excluded_nodes_are_remembered_once(tmp_path: Path) -> None:
    story = [chapter(excluded=node, next_rung=0) for node in ("c2", None, "c3", "c2")]
    write_story(tmp_path / "index.json", story)
    assert read_story(tmp_path / "index.json") == story
    assert excluded_nodes(story) == ["c2", "c3"]
    assert excluded_nodes([*story, chapter()]) == [], "whoever starts again has mended them, or finds them again"
    assert read_story(tmp_path / "none.json") == []
