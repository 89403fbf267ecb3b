"""Disk space for a checkpoint: what is removed, in which order, if that is not enough; checksums of its files."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

from shardmake.checkpoint import node_files, store
from shardmake.checkpoint.record import find_problems
from shardmake.core.disk import FreeSpace
from shardmake.core.errors import ShardmakeError
from shardmake.core.fingerprint import FileEntry, fingerprint
from shardmake.run.attempt import AttemptDir
from shardmake.run.training_settings import Retention
from shardmake.train import checkpoint_saver
from shardmake.train.checkpoint_saver import Saver, SupersededError
from tests.checkpoint_record import describe
from tests.unit.checkpoint.test_store import FILES, fail_rmtree, write
from tests.unit.train.conftest import in_ranks

SIZE = sum(map(len, FILES.values()))
DISK = 5 * SIZE + SIZE // 2


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with space for five and a half checkpoints."""

    def room(folder: Path) -> FreeSpace:
        files = [path for path in folder.rglob("*") if path.is_file() and path.name != "shardmake.json"]
        return FreeSpace(DISK - sum(path.stat().st_size for path in files), "your quota")

    monkeypatch.setattr(checkpoint_saver.disk, "free_space", room)
    return tmp_path / "checkpoints"


def save(saver: Saver, step: int, *, required: bool = False) -> bool:
    with saver.saving(step, required=required) as folder:
        if folder is not None:
            write(folder.parent, step, FILES, committed=False)
    return folder is not None


def filled(small: Path, saves: int = 5, **options: float) -> Saver:
    saver = Saver(small, describe, Retention(keep=5), **options)
    assert all(save(saver, step) for step in range(1, saves + 1))
    return saver


def steps(folder: Path) -> list[int]:
    return [step for step, _ in store.checkpoints(folder)]


def test_full_disk_removes_damaged_then_older_checkpoints(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardmake")
    saver = filled(small)
    assert saver.seconds is not None and saver.seconds < 60 and not (small / store.STAGING).exists()
    store.set_aside(small / "checkpoint-2")
    assert save(saver, 6)
    assert steps(small) == [6, 5, 4, 3, 1] and not store.damaged(small)
    assert "Removing damaged-checkpoint-2" in caplog.text
    assert save(saver, 7)
    assert steps(small) == [7, 6]


def test_older_ones_go_first(small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An error on the first rank only would leave the other ranks waiting."""
    saver = filled(small)
    store.set_aside(small / "checkpoint-2")
    monkeypatch.setattr(store, "REMOVE_SECONDS", 0.0)
    fail_rmtree(monkeypatch, store.damaged(small)[0].name, float("inf"))
    assert save(saver, 6)
    assert steps(small) == [6, 5] and store.damaged(small)
    assert caplog.messages == [f"Could not remove {store.damaged(small)[0]}: Directory not empty."]


def test_last_valid_checkpoints_are_never_removed(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest checkpoint is damaged, so the older ones stay. A save is skipped, unless it is required."""
    saver = filled(small)
    (small / "checkpoint-5/latest").write_bytes(b"x" * len(FILES["latest"]))
    assert not save(saver, 6)
    assert "checkpoint-6 is skipped. The next checkpoint needs" in caplog.text
    with pytest.raises(ShardmakeError, match=r"The next checkpoint needs 10 KiB.*\(your quota\)"):
        save(saver, 7, required=True)
    assert steps(small) == [5, 4, 3, 2, 1]


def test_required_save_waits(small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardmake")
    monkeypatch.setattr(checkpoint_saver, "_ROOM_POLL_SECONDS", 0.01)
    saver = filled(small, 4, room_seconds=60)
    (small / "checkpoint-4/latest").write_bytes(b"x" * len(FILES["latest"]))  # so older checkpoints are not removed
    other = small / "other"
    other.write_bytes(bytes(SIZE))
    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(save, saver, 5, required=True)
        while "Training waits up to" not in caplog.text and not saved.done():
            time.sleep(0.01)
        assert not saved.done()
        os.truncate(other, 0)
        assert saved.result()
    assert "There is room for checkpoint-5 now." in caplog.text
    assert steps(small) == [5, 4, 3, 2, 1]


def test_first_checkpoint_is_compared_with_the_estimate(small: Path) -> None:
    assert not save(Saver(small, describe, Retention(), expected_bytes=DISK + 1), 1)
    assert save(Saver(small, describe, Retention(), expected_bytes=DISK), 1)


def test_failed_write_reports_the_full_disk(small: Path) -> None:
    save(saver := Saver(small, describe, Retention()), 1)
    full = pytest.raises(ShardmakeError, match=r"filled up while checkpoint-2 was written.*resumes from checkpoint-1")
    with full, saver.saving(2, required=False):
        raise RuntimeError("unexpected pos 4176960 vs 4176848")
    assert steps(small) == [1]


def test_other_errors_are_not_changed(tmp_path: Path) -> None:
    other = pytest.raises(RuntimeError, match="something else")
    with other, Saver(tmp_path, describe, Retention()).saving(2, required=False):
        raise RuntimeError("something else")


READ = {
    0: [f"checkpoint-4/{name}" for name in ("config.json", "late.json", "shards/rank0.pt", "shards/rank1.pt")],
    2: [f"node-1/checkpoint-4/{name}" for name in ("config.json", "shards/rank2.pt", "shards/rank3.pt")],
}
"""The files that the first rank of each node reads: those that its node wrote, and one that no node lists."""


def _save_as_one_of_four(rank: int, folder: Path) -> None:
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
    staging, read = store.staging_folder(folder, 1), list[str]()

    def reading(path: Path, *, sync: bool = False) -> FileEntry:
        assert sync
        read.append(str(path.relative_to(staging)))
        return fingerprint(path, sync=sync)

    with (
        patch.object(node_files, "fingerprint", reading),
        Saver(folder, describe, Retention()).saving(4, required=True) as target,
    ):
        assert target == node_files.node_path(staging / "checkpoint-4", rank // 2)
        (target / "shards").mkdir(parents=True, exist_ok=True)
        (target / f"shards/rank{rank}.pt").write_bytes(bytes([rank]) * (rank + 1))
        (target / "config.json").write_bytes(b"{}")
        if rank == 3:  # past its node's folder, perhaps before the ranks of node 0 have made theirs
            (staging / "checkpoint-4").mkdir(parents=True, exist_ok=True)
            (staging / "checkpoint-4/late.json").write_bytes(b"late")
    assert sorted(read) == READ.get(rank, [])


def test_two_nodes_save_and_each_reads_only_what_it_wrote(tmp_path: Path) -> None:
    """Every file is in the record, also one that both nodes wrote alike, and one written past the node's folder."""
    in_ranks(_save_as_one_of_four, tmp_path, 4)
    ((record, path),) = store.committed(tmp_path)
    names = {"config.json", "late.json", *(f"shards/rank{rank}.pt" for rank in range(4))}
    assert set(record.files) == names and not find_problems(path)
    assert [one.name for one in tmp_path.iterdir()] == ["checkpoint-4"]


def test_ranks_of_an_attempt_that_a_later_one_follows_save_nothing(tmp_path: Path) -> None:
    """A node that was cut off returns: it touches neither the staged nor the committed checkpoints of the next one."""
    folders = [AttemptDir(tmp_path / f"attempts/{number:03d}") for number in (1, 2)]
    old, new = (Saver(tmp_path / "checkpoints", describe, Retention(keep=1), attempt=one) for one in folders)
    folders[0].root.mkdir(parents=True)
    with pytest.raises(SupersededError), old.saving(10, required=True) as staged:
        assert staged is not None
        staged.mkdir(parents=True)
        (staged / "latest").write_bytes(b"old")
        folders[1].root.mkdir()
        with new.saving(10, required=True) as other:
            assert other is not None and other != staged
            other.mkdir(parents=True)
            (other / "latest").write_bytes(b"new")
    with pytest.raises(SupersededError), old.saving(20, required=True):
        pytest.fail("it must not write")
    ((record, path),) = store.committed(tmp_path / "checkpoints")
    assert (record.step, (path / "latest").read_bytes()) == (10, b"new")
