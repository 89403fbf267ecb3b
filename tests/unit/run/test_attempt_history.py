"""Attempts: they decide how the next one starts, each belongs to one job, and the first error of their ranks counts."""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.run import attempt
from shardmake.run.attempt import AttemptDir, mark_meeting, record_error
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
from shardmake.run.attempt_owner import attempt_of_script, claim
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
    last = make_record(3, end="damaged checkpoint")
    assert idle_attempts([*[make_record(5, next_fallback=0)] * 2, damaged, damaged, last]) == 1
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


def test_of_many_claims_at_once_one_succeeds_and_all_see_it(tmp_path: Path) -> None:
    with ProcessPoolExecutor(8) as pool:
        owners = set(pool.map(partial(claim, AttemptDir(tmp_path)), map(str, range(64))))
    assert len(owners) == 1 and owners == {claim(AttemptDir(tmp_path), "later")}
    assert [path.name for path in tmp_path.iterdir()] == ["owner"], "no other traces"


def test_a_claimed_attempt_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that starts while the disk is full gets as far as its worker, which reports the disk."""
    claim(AttemptDir(tmp_path), "7")
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("it writes"))
    assert claim(AttemptDir(tmp_path), "8") == "7"


@pytest.mark.parametrize("left", [[], [".nfs0001"]])
def test_what_a_file_server_left_is_no_owner(tmp_path: Path, left: list[str]) -> None:
    folder = AttemptDir(tmp_path)
    folder.owner.mkdir()
    for name in left:
        (folder.owner / name).touch()
    assert [claim(folder, job) for job in ("7", "8")] == ["7", "7"]


def test_the_attempt_of_a_batch_script() -> None:
    slurm = Path("/shared/runs/a/train/attempts/003/slurm")
    assert attempt_of_script(slurm / ".submission_file_1.sh") == AttemptDir(slurm.parent)
    assert attempt_of_script(Path("/shared/runs/a/script.sh")) is None
    assert attempt_of_script(Path("(null)")) is None


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


def test_the_first_error_counts_also_if_clocks_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
