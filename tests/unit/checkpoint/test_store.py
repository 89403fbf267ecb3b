"""The checkpoint store: commit, validate, recover, prune."""

import errno
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shardmake.checkpoint import record as record_module
from shardmake.checkpoint import store
from shardmake.checkpoint.node_files import check_files
from shardmake.checkpoint.record import RECORD_NAME, CheckpointRecord, list_files, read_record
from shardmake.checkpoint.training_receipt import TRAINER_STATE, is_final
from shardmake.core.atomic import sealed, unsealed
from shardmake.core.errors import CheckpointError
from shardmake.core.fingerprint import FileEntry, fingerprint
from shardmake.run.training_settings import Retention
from tests.checkpoint_record import flip, make_record


def write(folder: Path, step: int, contents: dict[str, bytes], *, committed: bool = True, **record: Any) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    for name, content in contents.items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(content)
    if committed:
        store.commit_in_place(checkpoint, make_record(checkpoint, step, **record))
    return checkpoint


def stage(folder: Path, step: int) -> Path:
    """Return a save that is not committed."""
    return write(store.staging_folder(folder, 1), step, FILES, committed=False)


FILES = {"global_step1/rank0.pt": b"0" * 5000, "global_step1/rank1.pt": b"1" * 5000, "latest": b"global_step1"}


Log = pytest.LogCaptureFixture


@pytest.fixture
def log(caplog: Log) -> Log:
    caplog.set_level("INFO", "shardmake")
    return caplog


def step_of(found: tuple[CheckpointRecord, Path] | None) -> int:
    return found[0].step if found else 0


def newest(folder: Path) -> int:
    """Return the step of the newest valid checkpoint, 0 without one."""
    return step_of(store.newest_valid(folder))


def recovered(folder: Path) -> int:
    return step_of(store.recover(folder))


def test_an_unfinished_save_is_removed_and_a_persons_never(tmp_path: Path, log: Log) -> None:
    write(tmp_path, 5, FILES)
    unfinished = stage(tmp_path, 10)
    foreign = write(tmp_path, 15, FILES, committed=False)
    for _ in range(2):
        assert recovered(tmp_path) == 5 and not unfinished.exists() and list_files(foreign) == sorted(FILES)
    assert "checkpoint-15 is not used and stays" in log.text
    staged = stage(tmp_path, 15)
    store.commit(staged, make_record(staged, 15))
    assert newest(tmp_path) == 15
    aside = next(tmp_path.glob("foreign-checkpoint-15-*"))
    assert sorted(list_files(aside)) == sorted(FILES) and store.damaged(tmp_path) == []


def test_a_flipped_bit_of_a_record_makes_the_checkpoint_damaged(tmp_path: Path) -> None:
    """Every single one; a flip that leaves the values as they are, such as of white space, changes nothing."""
    record = write(tmp_path, 5, FILES) / RECORD_NAME
    content, before = record.read_bytes(), read_record(record.parent)
    for position in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        record.write_bytes(flipped)
        assert read_record(record.parent) in (None, before)
    record.write_bytes(content)
    shutil.copytree(record.parent, tmp_path / "checkpoint-6")
    assert newest(tmp_path) == 5, "the record of another step"


@pytest.mark.parametrize("content", [None, '{"max_steps": 5', '{"max_steps": 2}', ""])
def test_damaged_trainer_state_is_not_final(tmp_path: Path, content: str | None) -> None:
    """The driver checks `is_final` after every attempt, before the checkpoint is validated."""
    last = write(tmp_path, 5, FILES | {TRAINER_STATE: b'{"max_steps": 5}'})
    earlier = write(tmp_path, 4, FILES | {TRAINER_STATE: b'{"max_steps": 5}'})
    if content is not None:
        for folder in (last, earlier):
            (folder / TRAINER_STATE).write_text(content)
    assert is_final(read_record(last), last) == (content is None) and not is_final(read_record(earlier), earlier)


@pytest.mark.parametrize("content", [FILES["latest"], None, b""], ids=["truncated", "missing", "empty"])
def test_damaged_checkpoint_is_skipped(tmp_path: Path, log: Log, content: bytes | None) -> None:
    write(tmp_path, 5, FILES)
    shard = write(tmp_path, 10, FILES) / "global_step1/rank1.pt"
    shard.unlink() if content is None else shard.write_bytes(content)
    assert newest(tmp_path) == 5 and "rank1.pt" in log.messages[0]


def test_checkpoint_with_unreadable_file_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    write(tmp_path, 5, FILES)
    state = write(tmp_path, 10, FILES | {TRAINER_STATE: b'{"max_steps": 10}'}) / TRAINER_STATE
    read, fail = fingerprint, Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(record_module, "fingerprint", lambda path: fail() if path == state else read(path))
    assert not is_final(read_record(state.parent), state.parent) and newest(tmp_path) == 5
    assert log.messages == [f"Skipped checkpoint-10: {state} cannot be read (Input/output error)."]


@pytest.mark.parametrize("closed", ["trainer_state.json", RECORD_NAME])
def test_file_without_read_permission_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str) -> None:
    write(tmp_path, 5, FILES)
    newest_one = write(tmp_path, 10, FILES | {TRAINER_STATE: b'{"max_steps": 10}'})
    read, read_bytes = fingerprint, Path.read_bytes

    def refuse(path: Path) -> None:
        if path == newest_one / closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(record_module, "fingerprint", lambda path: refuse(path) or read(path))
    monkeypatch.setattr(Path, "read_bytes", lambda path: refuse(path) or read_bytes(path))
    with pytest.raises(CheckpointError, match=rf"Permission denied: .*{closed}.*Nothing was removed"):
        store.recover(tmp_path)
    assert newest_one.exists()


@settings(max_examples=40, deadline=None)
@given(position=st.integers(0, 4999), bit=st.integers(0, 7))
def test_any_flipped_bit_is_detected(tmp_path_factory: pytest.TempPathFactory, position: int, bit: int) -> None:
    folder = tmp_path_factory.mktemp("flip")
    flip(write(folder, 5, FILES) / "global_step1/rank0.pt", position, bit)
    assert newest(folder) == 0


@pytest.mark.parametrize(("newest_write", "removed"), [(None, [10, 5]), (10, [5])])
def test_prune_keeps_the_newest_and_the_new_one(tmp_path: Path, newest_write: int | None, removed: list[int]) -> None:
    for step in (5, 10, 15, 20):
        write(tmp_path, step, FILES)
    write(tmp_path, 25, FILES, committed=False)
    gone = store.prune(tmp_path, Retention(keep=2), newest_write)
    assert [path.name for path in gone] == [f"checkpoint-{step}" for step in removed]
    assert {step for step, _ in store.checkpoints(tmp_path)} == {5, 10, 15, 20, 25} - {*removed}


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o022, 0o644), (0o077, 0o600)])
def test_committed_files_have_the_mode_of_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    """safetensors writes its files with mode 0600."""
    before = os.umask(umask)
    try:
        staged = stage(tmp_path, 10)
        save_file({"weight": np.zeros(3)}, staged / "model.safetensors")
        (staged / "latest").chmod(0o600)
        check_files(staged, 1)
        final = store.commit(staged, make_record(staged, 10))
    finally:
        os.umask(before)
    names = [*list_files(final), RECORD_NAME]
    assert {stat.S_IMODE((final / name).stat().st_mode) for name in names} == {mode}


def test_a_link_in_a_checkpoint_opens_no_file_elsewhere(tmp_path: Path) -> None:
    """A member of the group can put one there while the checkpoint is committed."""
    private = tmp_path / "id_ed25519"
    private.touch(0o600)
    staged = store.staging_folder(tmp_path, 1) / "checkpoint-5"
    staged.mkdir(parents=True)
    staged.chmod(0o2770)
    (staged / "model.safetensors").symlink_to(private)
    check_files(staged, 1)
    store.commit(staged, make_record(staged, 5))
    assert stat.S_IMODE(private.stat().st_mode) == 0o600


def test_recover_returns_the_newest_valid_and_moves_damaged_ones(tmp_path: Path, log: Log) -> None:
    """If a damaged checkpoint stayed, retention would count it as the newest and delete valid ones."""
    assert recovered(tmp_path / "none") == 0
    for step in (3, 5, 4):
        write(tmp_path, step, FILES)
    (write(tmp_path, 10, FILES) / "latest").write_bytes(b"global_step2")
    stage(tmp_path, 15)
    assert recovered(tmp_path) == 5 and [step for step, _ in store.checkpoints(tmp_path)] == [5, 4, 3]
    assert [path.name.startswith("damaged-checkpoint-10") for path in store.damaged(tmp_path)] == [True]
    assert not (tmp_path / store.STAGING).exists()
    unfinished, skipped, renamed = log.messages
    assert unfinished == "Removing checkpoint-15: its save was not finished."
    assert skipped.startswith("Skipped checkpoint-10: ") and "latest is damaged" in skipped
    assert renamed.startswith("Renamed checkpoint-10 to damaged-checkpoint-10-")
    write(tmp_path, 10, FILES)
    store.prune(tmp_path, Retention(keep=1))
    assert newest(tmp_path) == 10


def fail_rmtree(monkeypatch: pytest.MonkeyPatch, name: str, times: float) -> None:
    """Let the removal of the folder ``name`` fail this many times, as if an exiting process still wrote into it."""
    rmtree, left = shutil.rmtree, [times]

    def fail(path: str, ignore_errors: bool = False, dir_fd: int | None = None) -> None:
        if path == name and left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        rmtree(path, ignore_errors, dir_fd=dir_fd)

    monkeypatch.setattr(shutil, "rmtree", fail)


def test_what_cannot_be_removed_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    """The removal is retried while a process still writes."""
    fail_rmtree(monkeypatch, "checkpoint-15", 2)
    stage(tmp_path, 15)
    store.discard_unfinished(tmp_path)
    assert len(log.messages) == 1 and not (tmp_path / store.STAGING).exists()
    log.clear()
    monkeypatch.setattr(store, "REMOVE_SECONDS", 0.0)
    fail_rmtree(monkeypatch, "checkpoint-10", float("inf"))
    write(tmp_path, 5, FILES)
    unfinished = stage(tmp_path, 10)
    assert recovered(tmp_path) == 5 and log.messages[1] == f"Could not remove {unfinished}: Directory not empty."
    log.clear()
    write(tmp_path, 10, FILES)
    staged = write(store.staging_folder(tmp_path, 1), 15, FILES)
    (staged.parent / ".nfs0001").touch()
    details = make_record(staged, 15).model_dump(exclude={"saved_at", "save_seconds", "rng_states", "files"})
    store.commit_and_prune(staged, make_record(staged, 15).files, details, 0.0, Retention(keep=1))
    assert [record.step for record, _ in store.committed(tmp_path)] == [15]
    assert log.messages == [f"Could not remove {tmp_path / '.saving/checkpoint-10'}: Directory not empty."]


def test_a_checkpoint_without_tensors_is_not_committed(tmp_path: Path) -> None:
    staged = write(store.staging_folder(tmp_path, 1), 15, FILES)
    details = make_record(staged, 15).model_dump(exclude={"saved_at", "save_seconds", "rng_states", "files"})
    names = ("optimizer_0/__0_0.distcp", "pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/__1_0.distcp")
    files = {name: FileEntry(size=size, crc32="00000000") for name, size in zip(names, (9, 0, 0), strict=True)}
    with pytest.raises(CheckpointError, match="pytorch_model_fsdp_0 holds no tensors"):
        store.commit_and_prune(staged, files, details, 0.0, Retention())
    assert not list(store.committed(tmp_path))


@pytest.mark.parametrize("content", [b"", b'{"step": 10', b"\xff\xfe{", b'{"step": 10}', None])
def test_checkpoint_with_an_unreadable_record_is_set_aside(tmp_path: Path, log: Log, content: bytes | None) -> None:
    write(tmp_path, 5, FILES)
    for step in (4, 10):
        record = write(tmp_path, step, FILES) / RECORD_NAME
        record.unlink()
        record.write_bytes(content) if content is not None else record.symlink_to(record.name)
    assert [record.step for record, _ in store.committed(tmp_path)] == [5] and recovered(tmp_path) == 5
    assert "shardmake.json is damaged or cannot be read" in log.messages[0]
    aside = store.damaged(tmp_path)
    assert [path.name.split("-")[2] for path in aside] == ["10", "4"]
    assert all((path / "global_step1/rank0.pt").read_bytes() == b"0" * 5000 for path in aside)


def test_record_of_a_newer_shardmake_is_read_and_other_folders_are_not_checkpoints(tmp_path: Path) -> None:
    record = write(tmp_path, 5, FILES) / RECORD_NAME
    values = unsealed(json.loads(record.read_text()))
    values["files"]["latest"]["blake3"] = "0"
    record.write_text(json.dumps(sealed(values | {"compressed": True})))
    assert newest(tmp_path) == 5
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-7").mkdir()
    os.mkfifo(tmp_path / "checkpoint-7" / "pipe")
    assert [step for step, _ in store.checkpoints(tmp_path)] == [7, 5] and list_files(tmp_path / "checkpoint-7") == []


@pytest.mark.parametrize(("retention", "losses", "kept"), [
    (Retention(keep=1), {}, {90}), (Retention(keep=3), {}, {90, 75, 60}), (Retention(keep=1, best=True), {}, {90, 45}),
    (Retention(keep=1, best=True), {45: float("nan"), 60: float("-inf")}, {90}),
    (Retention(keep=1, every_steps=40), {}, {90, 45}), (Retention(keep=1, every_steps=30), {}, {90, 60, 30}),
    (Retention(keep=0), {}, {90}),
])  # fmt: skip
def test_retention(tmp_path: Path, retention: Retention, losses: dict[int, float], kept: set[int]) -> None:
    for step, loss in ({15: 3.0, 30: 2.5, 45: 2.0, 60: 2.2, 75: None, 90: 2.1} | losses).items():
        write(tmp_path, step, FILES, eval_loss=loss)
    store.prune(tmp_path, retention)
    assert {step for step, _ in store.checkpoints(tmp_path)} == kept


@given(
    steps=st.lists(st.integers(1, 400), min_size=1, unique=True).map(sorted),
    keep=st.integers(0, 4), best=st.booleans(), every=st.none() | st.integers(1, 100),
)  # fmt: skip
def test_pruning_each_time_equals_pruning_at_last(steps: list[int], keep: int, best: bool, every: int | None) -> None:
    """The newest checkpoint is always kept."""
    retention = Retention(keep=keep, best=best, every_steps=every)
    losses: dict[int, float | None] = {step: (step * 37) % 101 for step in steps}
    left: list[int] = []
    for step in steps:
        left = [old for old in [*left, step] if old in retention.kept({one: losses[one] for one in [*left, step]})]
        assert left[-1] == step
    assert set(left) == retention.kept(losses)


@pytest.mark.parametrize("damage", [None, b"global_step99"], ids=["missing", "damaged"])
def test_the_tag_is_written_again_because_it_follows_from_the_record(tmp_path: Path, damage: bytes | None) -> None:
    write(tmp_path, 5, FILES)
    newest = write(tmp_path, 10, FILES | {"latest": b"global_step10"})
    (newest / "latest").unlink()
    if damage:
        (newest / "latest").write_bytes(damage)
    assert recovered(tmp_path) == 10 and (newest / "latest").read_bytes() == b"global_step10"
