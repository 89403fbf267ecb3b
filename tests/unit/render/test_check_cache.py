"""The libraries' parsers are asked once for the same content, and by one process at a time."""

import subprocess
import sys
from pathlib import Path

import pytest

from shardmake.render import check
from shardmake.render.check import ask_once

OVERLAP = """
import sys, time
from pathlib import Path
from shardmake.render.check import ask_once

def ask():
    with Path(sys.argv[1]).open("a") as log:
        print("starts", file=log, flush=True)
        time.sleep(0.2)
        print("ends", file=log, flush=True)
    return [[]]

ask_once("module", {"run": sys.argv[2]}, ask)
"""


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


@pytest.mark.parametrize(("runs", "times"), [("abc", 3), ("aaa", 1)])
def test_processes_that_start_at_once_ask_one_after_the_other(tmp_path: Path, runs: str, times: int) -> None:
    log = tmp_path / "log"
    children = [subprocess.Popen([sys.executable, "-c", OVERLAP, log, run]) for run in runs]
    assert [child.wait(60) for child in children] == [0] * len(runs)
    assert log.read_text().split() == ["starts", "ends"] * times
