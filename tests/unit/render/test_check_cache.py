"""The libraries' parsers are asked once for the same content."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from shardmake.render import check
from shardmake.render.check import ask_once


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Parsers:
    """Parsers that find ``problems``, and count how often they are asked."""

    def __init__(self, problems: list[list[str]]) -> None:
        self.problems, self.asked = problems, 0

    def __call__(self) -> list[list[str]]:
        self.asked += 1
        return self.problems


def test_accepted_content_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers = Parsers([[], []])
    for _ in range(3):
        assert ask_once("module", {"world_size": 2}, parsers) == [[], []]
    assert parsers.asked == 1
    ask_once("module", {"world_size": 4}, parsers)
    assert parsers.asked == 2, "another content"
    monkeypatch.setattr(check, "_software", lambda: ["another version"])
    ask_once("module", {"world_size": 4}, parsers)
    assert parsers.asked == 3, "another library"


def test_a_refusal_is_not_kept() -> None:
    parsers = Parsers([[], ["the disk is full"]])
    for _ in range(2):
        assert ask_once("module", {}, parsers) == [[], ["the disk is full"]]
    assert parsers.asked == 2


def test_the_files_of_several_runs_are_checked_at_once() -> None:
    both = Barrier(2, timeout=30)

    def parsers() -> list[list[str]]:
        both.wait()
        return []

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda size: ask_once("module", {"world_size": size}, parsers), (2, 4))] == [[], []]
