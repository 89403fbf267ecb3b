"""Asynchronous saves: the order of saves and uploads, warnings, and uploads that fail."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from shardmake.checkpoint import store
from shardmake.checkpoint.record import find_problems, list_files, read_record
from shardmake.config.models import Strategy
from shardmake.core import disk
from shardmake.core.disk import FreeSpace
from shardmake.run.training_settings import Retention
from shardmake.train.async_saver import ScratchFolder, share_of_node
from shardmake.train.callbacks.save_scheduler import SaveScheduler
from shardmake.train.checkpoint_saver import Saver
from tests.checkpoint_record import describe
from tests.unit.plans import make_plan
from tests.unit.train.conftest import in_ranks


def make_saver(root: Path, node: int = 0, nodes: int = 1) -> Saver:
    """Return the saver of the first rank of a node with its own scratch folder."""
    attempt = root / "attempts/001"
    attempt.mkdir(parents=True, exist_ok=True)
    scratch = ScratchFolder(root / f"scratch/node-{node}", root / "scratch", attempt, node, nodes, 1 / nodes)
    return Saver(root / "checkpoints", describe, Retention(keep=2), scratch=scratch)


def save(saver: Saver, step: int, *, required: bool = False, rank: int = 0, content: str = "") -> Path:
    """Save one file per rank, and one with ``content`` that all ranks write; return the folder they wrote to."""
    with saver.saving(step, required=required) as folder:
        assert folder is not None and folder.parent == saver.write_dir
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rng_state_{rank}.pth").write_bytes(bytes(1000 * step))
        (folder / "latest").write_text(content or f"global_step{step}")
    return folder


def kill_upload(saver: Saver, step: int) -> None:
    save(saver, step)
    assert saver.upload is not None
    saver.upload.kill()


def steps(root: Path) -> list[int]:
    return [record.step for record, path in store.committed(root / "checkpoints") if not find_problems(path)]


def test_next_save_waits_and_required_save_is_direct(tmp_path: Path) -> None:
    leftover = tmp_path / "scratch/node-0/checkpoint-1/file of a killed attempt"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    saver = make_saver(tmp_path)
    assert save(saver, 1).is_relative_to(tmp_path / "scratch/node-0")
    assert saver.pending_upload is not None and saver.upload_seconds == 0
    save(saver, 2)
    assert steps(tmp_path)[-1] == 1, "the next save waits for the upload"
    (record,) = [record for record, _ in store.committed(saver.folder) if record.step == 1]
    assert record.blocked_seconds is not None and 0 < record.blocked_seconds < record.save_seconds
    assert saver.upload_seconds == record.save_seconds
    assert set(record.files) == {"latest", "rng_state_0.pth"}
    assert save(saver, 3, required=True).is_relative_to(saver.folder)
    assert saver.pending_upload is None and steps(tmp_path) == [3, 2]
    last = read_record(saver.folder / "checkpoint-3")
    assert last is not None and last.blocked_seconds is None
    assert not list((tmp_path / "scratch/node-0").iterdir())


def test_full_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    room = lambda folder: FreeSpace(10 << 20 if "scratch" in str(folder) else 1 << 40, "free on the file system")  # noqa: E731
    monkeypatch.setattr(disk, "free_space", room)
    saver = make_saver(tmp_path)
    assert save(saver, 1).is_relative_to(saver.folder) and save(saver, 2).is_relative_to(saver.folder)
    assert steps(tmp_path) == [2, 1]
    assert caplog.text.count("is not saved asynchronously. The next checkpoint needs 64 MiB, and") == 1
    assert "node-0 has 10 MiB left" in caplog.text


@pytest.mark.parametrize(("strategies", "first", "second"), [
    (("ddp",), 1, 0), (("zero1", "zero2-offload"), 1 / 3 + 1 / 6, 1 / 6), (("zero3", "zero3-nvme", "fsdp"), 1 / 4, 1 / 4),
])  # fmt: skip
def test_first_node_needs_space_for_unsharded_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategies: tuple[Strategy, ...], first: float, second: float
) -> None:
    size = 12 << 30
    monkeypatch.setattr(disk, "free_space", lambda folder: FreeSpace(int(first * size) + (63 << 20), "free"))
    for choice in (make_plan(strategy, nodes=4).choice for strategy in strategies):
        shares = [share_of_node(choice, node) for node in range(4)]
        assert shares == pytest.approx([first, second, second, second])
        folders = [ScratchFolder(tmp_path / str(node), tmp_path, tmp_path, node, 4, shares[node]) for node in (0, 1)]
        assert [bool(scratch.make_room(size)) for scratch in folders] == [True, first == second]


def test_failed_upload_ends_training_after_a_required_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Node 0 waits for the part of node 1, which does not exist here."""
    save(make_saver(tmp_path), 1, required=True)
    saver = make_saver(tmp_path, nodes=2)
    kill_upload(saver, 2)
    with pytest.raises(RuntimeError, match=r"Uploading checkpoint-2 from the node's scratch.*it ended with -9.*Run"):
        save(saver, 3)
    assert steps(tmp_path) == [1] and saver.pending_upload is None
    kill_upload(saver, 4)
    save(saver, 5, required=True)
    assert steps(tmp_path) == [5, 1]
    assert "Uploading checkpoint-4 from" in caplog.text


def _save_on_two_nodes(rank: int, root: Path) -> None:
    """Save as the only rank of a node."""
    saver = make_saver(root, node=rank, nodes=2)
    folders = [save(saver, step, rank=rank) for step in (1, 2)]
    assert all(folder.is_relative_to(root / f"scratch/node-{rank}") for folder in folders)
    saver.wait_for_upload()
    assert steps(root) == [2, 1]
    assert set(list_files(saver.folder / "checkpoint-2")) == {"latest", "rng_state_0.pth", "rng_state_1.pth"}

    save(saver, 3, rank=rank, content=f"of rank {rank}")
    with pytest.raises(RuntimeError, match="Two nodes wrote latest with different content"):
        save(saver, 4, rank=rank)
    assert saver.scratch is not None
    if rank == 1:
        (root / "superseded/002").mkdir(parents=True)
        saver.scratch = replace(saver.scratch, attempt=root / "superseded/001")
    save(saver, 5, rank=rank)
    with pytest.raises(RuntimeError, match="a later attempt has started"):
        saver.wait_for_upload()
    assert saver.upload is None, "node 0's upload, which waited for node 1, was killed"
    save(saver, 6, rank=rank, required=True)
    assert steps(root) == [6, 2]


def test_two_nodes_agree_on_what_failed(tmp_path: Path) -> None:
    in_ranks(_save_on_two_nodes, tmp_path, 2)


@pytest.mark.parametrize(("upload_seconds", "expected"), [(0.0, 20), (150.0, 150)])
def test_interval_is_never_shorter_than_an_upload(upload_seconds: float, expected: int) -> None:
    """A step takes one second. Young's interval for 0.2 s and a failure every 1000 s is 20 s."""
    scheduler = SaveScheduler(SimpleNamespace(seconds=0.2, upload_seconds=upload_seconds), 1000.0)  # type: ignore[arg-type]
    scheduler.steps, scheduler.measured_seconds = 11, 10.0
    arguments, state = TrainingArguments(use_cpu=True), TrainerState()
    scheduler.on_save(arguments, state, TrainerControl())
    assert state.save_steps == expected
