"""Disk space for a checkpoint: what is removed, in which order, and what happens if that is not enough."""

from pathlib import Path
from typing import Any

import pytest

from shardmake.checkpoint import store
from shardmake.checkpoint.store import Retention
from shardmake.core.disk import FreeSpace
from shardmake.core.errors import ShardmakeError
from shardmake.train import checkpoint_saver
from shardmake.train.checkpoint_saver import Saver
from tests.unit.checkpoint.test_store import FILES, fail_rmtree, write

SIZE = sum(map(len, FILES.values()))
DISK = 5 * SIZE + SIZE // 2


def describe(step: int) -> dict[str, Any]:
    return {"tokens": step, "world_size": 1, "strategy": "ddp", "attempt": 1, "settings_digest": "r"}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with space for five and a half checkpoints."""

    def room(folder: Path) -> FreeSpace:
        held = sum(
            path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "shardmake.json"
        )
        return FreeSpace(DISK - held, "your quota")

    monkeypatch.setattr(checkpoint_saver.disk, "free_space", room)
    return tmp_path / "checkpoints"


def save(saver: Saver, step: int, *, required: bool = False) -> bool:
    with saver.saving(step, required=required) as folder:
        if folder is not None:
            write(folder.parent, step, FILES, committed=False)
    return folder is not None


def steps(folder: Path) -> list[int]:
    return [step for step, _ in store.checkpoints(folder)]


def test_older_checkpoints_are_removed_after_the_commit(small: Path) -> None:
    saver = Saver(small, describe, Retention(keep=2))
    assert all(save(saver, step) for step in (1, 2, 3))
    assert steps(small) == [3, 2]
    assert saver.seconds is not None and saver.seconds < 60
    assert not (small / store.STAGING).exists()


def test_full_disk_removes_damaged_then_older_checkpoints(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardmake")
    saver = Saver(small, describe, Retention(keep=5))
    assert all(save(saver, step) for step in (1, 2, 3, 4, 5))
    store.set_aside(small / "checkpoint-2")
    assert save(saver, 6)
    assert steps(small) == [6, 5, 4, 3, 1] and not store.damaged(small)
    assert "Removing damaged-checkpoint-2" in caplog.text
    assert save(saver, 7)
    assert steps(small) == [7, 6]


def test_older_checkpoints_are_removed_if_damaged_ones_cannot_be(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error on the first rank only would leave the other ranks waiting."""
    saver = Saver(small, describe, Retention(keep=5))
    assert all(save(saver, step) for step in (1, 2, 3, 4, 5))
    store.set_aside(small / "checkpoint-2")
    monkeypatch.setattr(store, "REMOVE_SECONDS", 0.0)
    fail_rmtree(monkeypatch, store.damaged(small)[0].name, float("inf"))
    assert save(saver, 6)
    assert steps(small) == [6, 5] and store.damaged(small)
    assert caplog.messages == [f"Could not remove {store.damaged(small)[0]}: Directory not empty."]


def test_last_valid_checkpoints_are_never_removed(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest checkpoint is damaged, so the older ones stay. A save is skipped, unless it is required."""
    saver = Saver(small, describe, Retention(keep=5))
    assert all(save(saver, step) for step in (1, 2, 3, 4, 5))
    (small / "checkpoint-5/latest").write_bytes(b"x" * len(FILES["latest"]))
    assert not save(saver, 6)
    assert "checkpoint-6 is skipped. The next checkpoint needs" in caplog.text
    with pytest.raises(ShardmakeError, match=r"The next checkpoint needs 10 KiB.*\(your quota\)"):
        save(saver, 7, required=True)
    assert steps(small) == [5, 4, 3, 2, 1]


def test_first_checkpoint_is_compared_with_the_estimate(small: Path) -> None:
    assert not save(Saver(small, describe, Retention(), expected_bytes=DISK + 1), 1)
    assert save(Saver(small, describe, Retention(), expected_bytes=DISK), 1)


def test_failed_write_reports_the_full_disk(small: Path) -> None:
    saver = Saver(small, describe, Retention())
    save(saver, 1)
    with (
        pytest.raises(ShardmakeError, match=r"filled up while checkpoint-2 was written.*resumes from checkpoint-1"),
        saver.saving(2, required=False),
    ):
        raise RuntimeError("unexpected pos 4176960 vs 4176848")
    assert steps(small) == [1]


def test_other_errors_are_not_changed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="something else"), Saver(tmp_path, describe, Retention()).saving(
        2, required=False
    ):  # fmt: skip
        raise RuntimeError("something else")
