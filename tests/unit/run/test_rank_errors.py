"""The order of the errors of ranks on nodes whose clocks differ."""

from pathlib import Path

import pytest

from shardmake.run import attempt
from shardmake.run.attempt import AttemptDir, mark_meeting, record_error


class Clocks:
    """The clocks of one node: its wall clock, which is ``ahead`` of the true time, and a monotonic one."""

    def __init__(self, ahead: float, booted: float) -> None:
        self.now, self.ahead, self.booted = 0.0, ahead, booted

    def time(self) -> float:
        return 1e9 + self.ahead + self.now

    def monotonic(self) -> float:
        return self.booted + self.now


def fail(monkeypatch: pytest.MonkeyPatch, folder: AttemptDir, rank: int, clocks: Clocks, met: float | None) -> None:
    """Record the error of ``rank`` at second 60, or later by its number; the ranks met at second ``met``."""
    monkeypatch.setattr(attempt, "time", clocks)
    monkeypatch.setattr(attempt, "_met", None)
    if met is not None:
        clocks.now = met
        mark_meeting()
    clocks.now = 60.0 + rank
    record_error(folder, rank, RuntimeError(f"rank {rank}"))


def test_the_first_error_counts_also_if_clocks_differ_by_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = AttemptDir(tmp_path)
    for rank, ahead in enumerate((600.0, 0.0, -600.0)):
        fail(monkeypatch, folder, rank, Clocks(ahead, booted=1000.0 * rank), met=30.0)
    assert [error.rank for error in folder.rank_errors()] == [0, 1, 2]
    assert [error.seconds for error in folder.rank_errors()] == [30.0, 31.0, 32.0]


def test_an_error_before_the_meeting_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = AttemptDir(tmp_path)
    for rank, met in enumerate((30.0, None, None)):
        fail(monkeypatch, folder, rank, Clocks(ahead=0.0, booted=0.0), met)
    assert [error.rank for error in folder.rank_errors()] == [1, 2, 0], "those without a meeting by their clocks"
