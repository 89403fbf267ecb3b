"""Disk space for a checkpoint: what is removed, in which order, if that is not enough; checksums of its files."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardmake.checkpoint import store
from shardmake.checkpoint.record import FileEntry, fingerprint
from shardmake.checkpoint.store import Retention
from shardmake.core.disk import FreeSpace
from shardmake.core.errors import ShardmakeError
from shardmake.train import checkpoint_saver
from shardmake.train.checkpoint_saver import Saver, share_of_files
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


SHARDS = {
    "zero": [
        "global_step6/mp_rank_00_model_states.pt",
        *(f"global_step6/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(4)),
    ],
    "zero3": [f"global_step6/zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(4)],
    "fsdp": [f"{part}_0/__{rank}_{number}.distcp" for part in ("pytorch_model_fsdp", "optimizer")
             for rank in range(4) for number in (0, 1)],
    "nvme": [f"global_step6/offloaded_tensors/rank{rank:02}/{number}.tensor.swp"
             for rank in range(4) for number in range(3)],
}  # fmt: skip
OF_RANK_0 = ["config.json", "latest", "optimizer_0/.metadata", "trainer_state.json", "tokenizer.json"]


def written_by(name: str) -> int:
    """Return the rank that the test put into the name of a shard."""
    digits = re.findall(r"zero_pp_rank_(\d)|__(\d)|/rank0(\d)|rng_state_(\d)", name)
    return int("".join(digits[0])) if digits else 0


@pytest.mark.parametrize("kind", SHARDS)
@pytest.mark.parametrize("node_size", [1, 2, 4])
def test_a_file_is_read_once_and_by_the_node_that_wrote_it(kind: str, node_size: int) -> None:
    names = sorted([*SHARDS[kind], *OF_RANK_0, *(f"rng_state_{rank}.pth" for rank in range(4))])
    shares = [share_of_files(names, rank, 4, node_size) for rank in range(4)]
    assert sorted(name for share in shares for name in share) == names
    for rank, share in enumerate(shares):
        assert all(written_by(name) // node_size == rank // node_size for name in share)
        assert share, "all ranks of a node take part"


def test_tensor_parallel_shards_are_read_by_their_node() -> None:
    """Ranks 0 and 1 are the first group; DeepSpeed numbers a shard by group and by rank within the group."""
    names = sorted(f"zero_pp_rank_{rank // 2}_mp_rank_{rank % 2:02}_optim_states.pt" for rank in range(8))
    for rank in range(8):
        assert share_of_files(names, rank, 8, 1) == [f"zero_pp_rank_{rank // 2}_mp_rank_{rank % 2:02}_optim_states.pt"]


def test_files_of_ranks_that_do_not_exist_are_read_all_the_same() -> None:
    assert share_of_files(["rng_state_9.pth", "x/__7_0.distcp"], 0, 2, 1) == ["rng_state_9.pth", "x/__7_0.distcp"]


def test_four_ranks_on_two_nodes_agree_on_the_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*SHARDS["zero"], *OF_RANK_0]
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes([number]) * (number + 1))
    place, meeting, box = threading.local(), threading.Barrier(4), {}

    def gather(value: Any) -> list[Any]:
        box[place.rank] = value
        meeting.wait(60)
        values = [box[rank] for rank in range(4)]
        meeting.wait(60)
        return values

    read: dict[str, int] = {}

    def reading(path: Path) -> FileEntry:
        read[str(path.relative_to(tmp_path))] = place.rank
        return fingerprint(path)

    replaced = {
        "gather": gather, "barrier": lambda: gather(None), "get_rank": lambda: place.rank, "get_world_size": lambda: 4,
        "get_node_size": lambda: 2, "is_first_of_node": lambda: place.rank % 2 == 0, "fingerprint": reading,
    }  # fmt: skip
    for name, function in replaced.items():
        monkeypatch.setattr(checkpoint_saver, name, function)

    def run(rank: int) -> dict[str, FileEntry]:
        place.rank = rank
        return checkpoint_saver._sync_files(tmp_path)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(4)))
    assert found == [{name: fingerprint(tmp_path / name) for name in sorted(names)}] * 4
    assert {name: rank // 2 for name, rank in read.items()} == {name: written_by(name) // 2 for name in names}
