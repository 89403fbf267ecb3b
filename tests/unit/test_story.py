"""What the attempts so far mean for the next."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.launch.story import Chapter, excluded_nodes, idle_attempts, next_rung, read_story, write_story


def chapter(step: int = 0, **values: object) -> Chapter:
    base: dict[str, object] = dict(
        attempt=1, job="1", plan="p", strategy="zero3", rung=0, submitted=0.0, ended=1.0, end="lost", sentence="", host=None,
        checkpoint_step=step,
    )  # fmt: skip
    return Chapter.model_validate(base | values)


@pytest.mark.parametrize(
    ("steps", "idle"),
    [([], 0), ([0], 1), ([5], 0), ([0, 0, 0], 3), ([0, 10], 0), ([0, 10, 10, 10], 2), ([5, 5, 9, 9], 1), ([9, 4], 1)],
)
def test_idle_attempts(steps: list[int], idle: int) -> None:
    assert idle_attempts([chapter(step) for step in steps]) == idle


@given(st.lists(st.integers(0, 3), max_size=8))
def test_progress_resets_the_count(steps: list[int]) -> None:
    story = [chapter(step) for step in steps]
    assert 0 <= idle_attempts(story) <= len(story)
    assert idle_attempts([*story, chapter(4)]) == 0


def test_rungs() -> None:
    assert next_rung([], "p") == 0
    assert next_rung([chapter(next_rung=1)], "p") == 1
    assert next_rung([chapter(next_rung=1), chapter(rung=1, next_rung=2)], "p") == 2
    assert next_rung([chapter(rung=2)], "p") == 2, "a driver that died before it decided"
    assert next_rung([chapter(rung=2)], "another plan") == 0


def test_excluded_nodes_are_remembered_once(tmp_path: Path) -> None:
    story = [chapter(excluded="c2"), chapter(), chapter(excluded="c3"), chapter(excluded="c2")]
    write_story(tmp_path / "index.json", story)
    assert read_story(tmp_path / "index.json") == story
    assert excluded_nodes(story) == ["c2", "c3"]
    assert read_story(tmp_path / "none.json") == []
