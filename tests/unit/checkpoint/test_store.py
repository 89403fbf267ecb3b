"""A checkpoint counts once its record is in place, and no longer than its bytes are as recorded."""

import errno
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardmake.checkpoint import store
from shardmake.checkpoint.finished import STATE, is_last
from shardmake.checkpoint.store import CheckpointRecord, FileEntry, Retention
from shardmake.core.errors import ShardmakeError


def make_record(checkpoint: Path, step: int, eval_loss: float | None = None) -> CheckpointRecord:
    return CheckpointRecord(
        step=step, tokens=step, world_size=2, strategy="zero3", attempt=1, recipe="r", saved_at=0.0, save_seconds=0.0,
        versions={}, eval_loss=eval_loss,
        files={name: store.fingerprint(checkpoint / name) for name in store.list_files(checkpoint)},
    )  # fmt: skip


def write(
    folder: Path, step: int, contents: dict[str, bytes], *, sealed: bool = True, eval_loss: float | None = None
) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    for name, content in contents.items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(content)
    if sealed:
        store.seal(checkpoint, make_record(checkpoint, step, eval_loss))
    return checkpoint


FILES = {"global_step1/rank0.pt": b"0" * 5000, "global_step1/rank1.pt": b"1" * 5000, "latest": b"global_step1"}


def newest(folder: Path) -> tuple[int, list[str]]:
    heard: list[str] = []
    found = store.newest_valid(folder, heard.append)
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
    store.discard_unfinished(tmp_path, heard.append)
    assert not half.exists() and newest(tmp_path)[0] == 5


@pytest.mark.parametrize(
    ("content", "is_over"),
    [(None, True), ('{"max_steps": 5', False), ('{"max_steps": 2}', False), ("", False)],
    ids=["intact", "cut", "flipped", "empty"],
)
def test_a_damaged_state_ends_no_training(tmp_path: Path, content: str | None, is_over: bool) -> None:
    """The driver asks after every attempt, before anything has looked at the checkpoint's bytes."""
    checkpoint = write(tmp_path, 5, FILES | {STATE: b'{"max_steps": 5}'})
    half = write(tmp_path, 4, FILES | {STATE: b'{"max_steps": 5}'})
    if content is not None:
        for folder in (checkpoint, half):
            (folder / STATE).write_text(content)
    assert is_last(recorded(checkpoint), checkpoint) == is_over
    assert not is_last(recorded(half), half)


def recorded(checkpoint: Path) -> CheckpointRecord:
    record = store.read_record(checkpoint)
    assert record
    return record


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


def test_a_file_that_cannot_be_read_is_fallen_back_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 5, FILES)
    state = write(tmp_path, 10, FILES | {STATE: b'{"max_steps": 10}'}) / STATE
    read = store.fingerprint

    def fail(path: Path) -> FileEntry:
        if path == state:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path)

    monkeypatch.setattr(store, "fingerprint", fail)
    assert not is_last(recorded(state.parent), state.parent)
    assert newest(tmp_path) == (5, [f"checkpoint-10 does not count: {state} cannot be read (Input/output error)"])


@pytest.mark.parametrize("closed", ["trainer_state.json", store.RECORD_NAME])
def test_what_belongs_to_another_member_is_neither_damaged_nor_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    write(tmp_path, 5, FILES)
    newest_one = write(tmp_path, 10, FILES | {STATE: b'{"max_steps": 10}'})
    read, read_bytes = store.fingerprint, Path.read_bytes

    def refuse(path: Path) -> None:
        if path == newest_one / closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(store, "fingerprint", lambda path: refuse(path) or read(path))
    monkeypatch.setattr(Path, "read_bytes", lambda path: refuse(path) or read_bytes(path))
    with pytest.raises(ShardmakeError, match=rf"{closed} is not yours to read.*Nothing was removed"):
        store.recover(tmp_path, print)
    assert newest_one.exists()


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
    gone = store.prune(tmp_path, Retention(keep=2))
    assert [path.name for path in gone] == ["checkpoint-5"]
    assert [step for step, _ in store.checkpoints(tmp_path)] == [20, 15, 10]


def test_a_kill_while_pruning_leaves_nothing_that_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (5, 10):
        write(tmp_path, step, FILES)

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store.shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        store.prune(tmp_path, Retention(keep=1))
    assert [record.step for record, _ in store.committed(tmp_path)] == [10]


def test_what_is_being_written_is_no_checkpoint_until_it_is_moved(tmp_path: Path) -> None:
    write(tmp_path, 5, FILES)
    staged = write(tmp_path / store.STAGING, 10, FILES, sealed=False)
    assert staged == store.staging(tmp_path, 10)
    assert [step for step, _ in store.checkpoints(tmp_path)] == [5]
    final = store.commit(staged, make_record(staged, 10))
    assert newest(tmp_path) == (10, []) and final == tmp_path / "checkpoint-10" and not staged.exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o022, 0o644), (0o077, 0o600)])
def test_files_of_a_checkpoint_are_as_open_as_the_umask_allows(tmp_path: Path, umask: int, mode: int) -> None:
    """Safetensors writes them for their owner only."""
    before = os.umask(umask)
    try:
        staged = write(tmp_path / store.STAGING, 10, FILES, sealed=False)
        save_file({"weight": torch.zeros(3)}, staged / "model.safetensors")
        (staged / "latest").chmod(0o600)
        final = store.commit(staged, make_record(staged, 10))
    finally:
        os.umask(before)
    names = [*store.list_files(final), store.RECORD_NAME]
    assert {stat.S_IMODE((final / name).stat().st_mode) for name in names} == {mode}


def test_recovery_takes_the_newest_whole_one_and_clears_the_way(tmp_path: Path) -> None:
    """A damaged one that stayed would be counted as the newest by retention, and the good ones deleted."""
    write(tmp_path, 5, FILES)
    (write(tmp_path, 10, FILES) / "latest").write_bytes(b"global_step2")
    write(tmp_path / store.STAGING, 15, FILES, sealed=False)
    heard: list[str] = []
    found = store.recover(tmp_path, heard.append)
    assert found is not None and found[0].step == 5
    assert [step for step, _ in store.checkpoints(tmp_path)] == [5]
    assert [path.name.startswith("damaged-checkpoint-10") for path in store.damaged(tmp_path)] == [True]
    assert not (tmp_path / store.STAGING).exists()
    assert ["checkpoint-15" in heard[0], "latest is damaged" in heard[1], "now lies in" in heard[2]] == [True] * 3
    write(tmp_path, 10, FILES)
    store.prune(tmp_path, Retention(keep=1))
    assert newest(tmp_path)[0] == 10


def stubborn(monkeypatch: pytest.MonkeyPatch, name: str, times: float) -> None:
    """Removing the folder ``name`` fails so often, as where a process that is dying still writes into it."""
    rmtree, left = shutil.rmtree, [times]

    def fail(path: Path, ignore_errors: bool = False) -> None:
        if path.name == name and left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        rmtree(path, ignore_errors)

    monkeypatch.setattr(store.shutil, "rmtree", fail)


def test_removing_waits_for_a_writer_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = write(tmp_path, 10, FILES, sealed=False)
    stubborn(monkeypatch, half.name, 2)
    store.discard_unfinished(tmp_path, print)
    assert not half.exists()


def test_what_cannot_be_removed_is_told_and_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "REMOVE_SECONDS", 0.0)
    stubborn(monkeypatch, "checkpoint-10", float("inf"))
    write(tmp_path, 5, FILES)
    half = write(tmp_path, 10, FILES, sealed=False)
    heard: list[str] = []
    found = store.recover(tmp_path, heard.append)
    assert found is not None and found[0].step == 5
    assert heard[1] == f"{half} could not be removed (Directory not empty); it stays."

    write(tmp_path, 10, FILES)
    staged = write(tmp_path / store.STAGING, 15, FILES)
    (staged.parent / ".nfs0001").touch()
    described = make_record(staged, 15).model_dump(exclude={"saved_at", "save_seconds", "rng_states", "files"})
    store.finish(staged, make_record(staged, 15).files, described, 0.0, Retention(keep=1))
    assert [record.step for record, _ in store.committed(tmp_path)] == [15]
    assert "checkpoint-10 could not be removed (Directory not empty)" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b'{"step": 10', b"\xff\xfe{", b'{"step": 10}', None])
def test_a_checkpoint_whose_record_cannot_be_read_is_set_aside_and_not_removed(
    tmp_path: Path, content: bytes | None
) -> None:
    write(tmp_path, 5, FILES)
    for step in (4, 10):
        record = write(tmp_path, step, FILES) / store.RECORD_NAME
        record.unlink()
        record.write_bytes(content) if content is not None else record.symlink_to(record.name)
    assert [record.step for record, _ in store.committed(tmp_path)] == [5]
    heard: list[str] = []
    found = store.recover(tmp_path, heard.append)
    assert found is not None and found[0].step == 5
    assert "shardmake.json is damaged or cannot be read" in heard[0]
    aside = store.damaged(tmp_path)
    assert [path.name.split("-")[2] for path in aside] == ["10", "4"]
    assert all((path / "global_step1/rank0.pt").read_bytes() == b"0" * 5000 for path in aside)


def test_the_record_of_a_newer_shardmake_counts(tmp_path: Path) -> None:
    record = write(tmp_path, 5, FILES) / store.RECORD_NAME
    values = json.loads(record.read_text())
    values["files"]["latest"]["blake3"] = "0"
    record.write_text(json.dumps(values | {"compressed": True}))
    assert newest(tmp_path) == (5, [])


def test_recovery_of_nothing(tmp_path: Path) -> None:
    assert store.recover(tmp_path / "none", print) is None


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Retention(keep=1), {90}),
        (Retention(keep=3), {90, 75, 60}),
        (Retention(keep=1, best=True), {90, 45}),
        (Retention(keep=1, every_steps=40), {90, 45}),
        (Retention(keep=1, every_steps=30), {90, 60, 30}),
        (Retention(keep=0), {90}),
        (Retention(keep=3, best=True, every_steps=30).scarce(), {90, 45}),
    ],
)
def test_what_is_kept(tmp_path: Path, rule: Retention, kept: set[int]) -> None:
    losses = {15: 3.0, 30: 2.5, 45: 2.0, 60: 2.2, 75: None, 90: 2.1}
    for step, loss in losses.items():
        write(tmp_path, step, FILES, eval_loss=loss)
    store.prune(tmp_path, rule)
    assert {step for step, _ in store.checkpoints(tmp_path)} == kept


@pytest.mark.parametrize("loss", [float("nan"), float("-inf")])
def test_a_loss_that_is_no_number_is_not_the_best(tmp_path: Path, loss: float) -> None:
    for step, eval_loss in {15: 2.0, 30: 2.5, 45: loss}.items():
        write(tmp_path, step, FILES, eval_loss=eval_loss)
    store.prune(tmp_path, Retention(keep=1, best=True))
    assert {step for step, _ in store.checkpoints(tmp_path)} == {15, 45}


@given(
    steps=st.lists(st.integers(1, 400), min_size=1, unique=True).map(sorted),
    keep=st.integers(0, 4), best=st.booleans(), every=st.none() | st.integers(1, 100),
)  # fmt: skip
def test_pruning_after_each_save_keeps_what_pruning_at_the_end_would(
    steps: list[int], keep: int, best: bool, every: int | None
) -> None:
    """And the newest in any case: the one that was just written is never the one that goes."""
    rule = Retention(keep, best, every)
    records = [
        CheckpointRecord(
            step=step, tokens=0, world_size=1, strategy="ddp", attempt=1, recipe="", saved_at=0, save_seconds=0,
            versions={}, files={}, eval_loss=(step * 37) % 101,
        )
        for step in steps
    ]  # fmt: skip
    alive: list[CheckpointRecord] = []
    for record in records:
        alive = [old for old in [*alive, record] if old.step in rule.kept([*alive, record])]
        assert alive[-1] is record
    assert {record.step for record in alive} == rule.kept(records)


def test_other_folders_are_not_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-7").mkdir()
    os.mkfifo(tmp_path / "checkpoint-7" / "pipe")
    assert [step for step, _ in store.checkpoints(tmp_path)] == [7]
    assert store.list_files(tmp_path / "checkpoint-7") == []
