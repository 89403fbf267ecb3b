"""The libraries' parsers are asked once for the same content, and by few processes at a time."""

import subprocess
import sys
from pathlib import Path

import pytest

from shardmake.render import check
from shardmake.render.check import ask_once

OVERLAP = """
import os, sys, time
from pathlib import Path
from shardmake.render.check import ask_once

path, run, cores = sys.argv[1:]
os.sched_getaffinity = lambda process: range(int(cores))

def ask():
    with Path(path).open("a") as log:
        print("starts", file=log, flush=True)
        deadline = time.monotonic() + (0.2 if cores == "4" else 30)
        while Path(path).read_text().count("starts") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        print("ends", file=log, flush=True)
    return [[]]

ask_once("module", {"run": run}, ask)
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
def test_on_four_cores_processes_that_start_at_once_ask_one_after_the_other(
    tmp_path: Path, runs: str, times: int
) -> None:
    assert _ask_at_once(tmp_path / "log", runs, cores=4) == ["starts", "ends"] * times


def test_on_many_cores_several_processes_ask_at_once(tmp_path: Path) -> None:
    """The first waits for a second, which five other contents in eight slots bring."""
    assert _ask_at_once(tmp_path / "log", "abcdef", cores=32)[:2] == ["starts", "starts"]


def _ask_at_once(log: Path, runs: str, cores: int) -> list[str]:
    children = [subprocess.Popen([sys.executable, "-c", OVERLAP, log, run, str(cores)]) for run in runs]
    assert [child.wait(90) for child in children] == [0] * len(runs)
    return log.read_text().split()
