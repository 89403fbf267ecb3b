"""The record of a save, read by the merge: a file that differs is found without reading the tensors."""

import shutil
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardmake.checkpoint.record import RECORD_NAME
from shardmake.consolidate import source_checks
from shardmake.consolidate.source_checks import archive_crc32, check_recorded
from shardmake.core.errors import CheckpointError
from tests.checkpoint_record import flip, make_record


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_checks, "_READ", 1000)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Write a recorded checkpoint: one archive, a file of several archives, and a text."""
    folder = tmp_path / "checkpoint-4"
    (folder / "states").mkdir(parents=True)
    torch.save({"small": torch.ones(3), "large": torch.arange(9000.0)}, folder / "states" / "rank.pt")
    dcp.save({"a": torch.arange(5000.0), "b": torch.ones(7)}, checkpoint_id=folder / "states", no_dist=True)
    (folder / "notes.txt").write_text("text")
    record(folder, 4)
    return folder


def record(folder: Path, step: int) -> None:
    (folder / RECORD_NAME).write_text(make_record(folder, step).model_dump_json())


def test_sum_of_an_archive_needs_no_tensor(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = source_checks.crc32_of

    def count(file: int, begin: int, end: int, crc: int) -> int:
        read.append(end - begin)
        return original(file, begin, end, crc)

    monkeypatch.setattr(source_checks, "crc32_of", count)
    for path in (checkpoint / "states" / "rank.pt", next(checkpoint.glob("states/*.distcp"))):
        read.clear()
        assert archive_crc32(path) == zlib.crc32(path.read_bytes()) and 0 < sum(read) < path.stat().st_size / 2
    assert archive_crc32(checkpoint / "notes.txt") is None
    (checkpoint / "empty").touch()
    assert archive_crc32(checkpoint / "empty") == 0


def test_recorded_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    found = check_recorded([checkpoint / "states", checkpoint], [checkpoint / "states" / "rank.pt"], 2)
    assert found is not None and found.step == 4 and len(found.files) == 4
    (checkpoint / RECORD_NAME).unlink()
    assert check_recorded([checkpoint], [], 2) is None


def test_differing_files_are_named(checkpoint: Path) -> None:
    rank = checkpoint / "states" / "rank.pt"
    flip(rank, rank.read_bytes().index(b"large"))
    (checkpoint / "notes.txt").write_text("more text")
    next(checkpoint.glob("states/*.distcp")).unlink()
    (checkpoint / "states" / "new.pt").touch()
    with pytest.raises(CheckpointError) as found:
        check_recorded([checkpoint], [rank, checkpoint / "states" / "new.pt", Path("/elsewhere/model")], 2)
    for problem in ("rank.pt has another", "notes.txt has 9 bytes", ".distcp is missing", "new.pt was added after"):
        assert problem in str(found.value)
    assert "elsewhere" not in str(found.value)


def test_file_of_another_step_with_the_same_size(checkpoint: Path, tmp_path: Path) -> None:
    """Nothing in a file of DCP says of which save it is."""
    other = tmp_path / "other"
    dcp.save({"a": torch.arange(5000.0) + 1, "b": torch.ones(7)}, checkpoint_id=other, no_dist=True)
    ours = next(checkpoint.glob("states/*.distcp"))
    assert (other / ours.name).stat().st_size == ours.stat().st_size
    shutil.copy(other / ours.name, ours)
    with pytest.raises(CheckpointError, match=rf"{ours.name} has another content"):
        check_recorded([checkpoint], [ours], 2)


def test_damaged_record(checkpoint: Path) -> None:
    (checkpoint / RECORD_NAME).write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        check_recorded([checkpoint], [], 2)


def test_archive_without_checksums_is_read(checkpoint: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.arange(9000.0), checkpoint / "states" / "rank.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    record(checkpoint, 4)
    assert check_recorded([checkpoint], [], 2) is not None


def test_large_file_that_is_not_needed_is_not_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_checks, "_LARGE", 3)
    (checkpoint / "notes.txt").write_text("exit")
    assert check_recorded([checkpoint], [], 2) is not None
    with pytest.raises(CheckpointError, match=r"notes\.txt has another content"):
        check_recorded([checkpoint], [checkpoint / "notes.txt"], 2)
