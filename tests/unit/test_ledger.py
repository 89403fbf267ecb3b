"""A checkpoint counts once its record is in place, and no longer than its bytes are as recorded."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmake.train import ledger


def write(folder: Path, step: int, contents: dict[str, bytes], *, sealed: bool = True) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    for name, content in contents.items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(content)
    if sealed:
        record = ledger.CheckpointRecord(
            step=step, tokens=step, world_size=2, strategy="zero3", attempt=1, recipe="r", saved_at=0.0,
            save_seconds=0.0, versions={},
            files={name: ledger.fingerprint(checkpoint / name) for name in ledger.list_files(checkpoint)},
        )  # fmt: skip
        ledger.seal(checkpoint, record)
    return checkpoint


FILES = {"global_step1/rank0.pt": b"0" * 5000, "global_step1/rank1.pt": b"1" * 5000, "latest": b"global_step1"}


def newest(folder: Path) -> tuple[int, list[str]]:
    heard: list[str] = []
    found = ledger.newest_whole(folder, heard.append)
    return (found[0].step if found else 0), heard


def test_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    for step in (5, 10, 9):
        write(tmp_path, step, FILES)
    assert newest(tmp_path) == (10, [])


def test_an_unfinished_one_does_not_count_and_is_removed(tmp_path: Path) -> None:
    write(tmp_path, 5, FILES)
    half = write(tmp_path, 10, FILES, sealed=False)
    step, heard = newest(tmp_path)
    assert step == 5 and "checkpoint-10 does not count" in heard[0]
    ledger.discard_unfinished(tmp_path, heard.append)
    assert not half.exists() and newest(tmp_path)[0] == 5


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "empty"])
def test_damage_is_found_and_falls_back(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 5, FILES)
    shard = write(tmp_path, 10, FILES) / "global_step1/rank1.pt"
    content = bytearray(shard.read_bytes())
    if damage == "missing":
        shard.unlink()
    else:
        content[2500] ^= 1
        shard.write_bytes({"truncated": FILES["latest"], "flipped": bytes(content), "empty": b""}[damage])
    step, heard = newest(tmp_path)
    assert step == 5
    assert "rank1.pt" in heard[0]


@settings(max_examples=40, deadline=None)
@given(position=st.integers(0, 4999), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, position: int, bit: int) -> None:
    folder = tmp_path_factory.mktemp("flip")
    shard = write(folder, 5, FILES) / "global_step1/rank0.pt"
    with shard.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))
    assert newest(folder)[0] == 0


def test_pruning_keeps_the_newest_and_never_an_unsealed_one_instead(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        write(tmp_path, step, FILES)
    write(tmp_path, 20, FILES, sealed=False)
    gone = ledger.prune(tmp_path, keep=2)
    assert [path.name for path in gone] == ["checkpoint-5"]
    assert [step for step, _ in ledger.checkpoints(tmp_path)] == [20, 15, 10]


def test_a_kill_while_pruning_leaves_nothing_that_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (5, 10):
        write(tmp_path, step, FILES)

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ledger.shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        ledger.prune(tmp_path, keep=1)
    assert [record.step for record, _ in ledger.sealed(tmp_path)] == [10]


def test_other_folders_are_not_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-7").mkdir()
    os.mkfifo(tmp_path / "checkpoint-7" / "pipe")
    assert [step for step, _ in ledger.checkpoints(tmp_path)] == [7]
    assert ledger.list_files(tmp_path / "checkpoint-7") == []
