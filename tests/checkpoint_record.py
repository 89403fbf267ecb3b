"""The record of a checkpoint that no training wrote, and damage to a file."""

from pathlib import Path
from typing import Any

from shardmake.checkpoint.record import CheckpointRecord, list_files
from shardmake.checkpoint.store import commit_in_place
from shardmake.core.fingerprint import fingerprint


def describe(step: int) -> dict[str, Any]:
    """Return what the record of ``step`` contains besides the files and times of the save."""
    return {"tokens": step, "world_size": 2, "strategy": "zero3", "attempt": 1, "settings_digest": "r"}


def make_record(folder: Path, step: int, **changes: Any) -> CheckpointRecord:
    """Return the record of the files in ``folder``, if there are any, at ``step``."""
    values = {
        **describe(step), "step": step, "saved_at": 0.0, "save_seconds": 0.0, "versions": {},
        "files": {name: fingerprint(folder / name) for name in list_files(folder)},
    }  # fmt: skip
    return CheckpointRecord.model_validate(values | changes)


def commit_checkpoint(folder: Path, step: int, **changes: Any) -> Path:
    """Commit the checkpoint in ``folder``, whose files exist."""
    folder.mkdir(parents=True, exist_ok=True)
    commit_in_place(folder, make_record(folder, step, **changes))
    return folder


def flip(path: Path, byte: int = -1, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)
