"""The checkpoint ledger: a checkpoint counts once its record is in place, and the record is written last.

A record lists every file with size and CRC-32, so a truncated or bit-flipped shard is found before anything is
loaded, and resuming falls back to the checkpoint before.
"""

import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardmake.receipt import fsync_directory, write_json

RECORD_NAME = "shardmake.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")
_BLOCK = 16 << 20


class FileEntry(BaseModel):
    """Size and checksum of one file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int = Field(description="Bytes.")
    crc32: str = Field(description="CRC-32 of the content, eight hex digits.")


class CheckpointRecord(BaseModel):
    """What a checkpoint is; its presence says that the checkpoint is whole."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int = Field(description="Optimizer steps done.")
    tokens: int = Field(description="Tokens seen, padding included.")
    world_size: int = Field(description="Ranks that wrote it.")
    strategy: str = Field(description="How it is sharded.")
    attempt: int = Field(description="Attempt that wrote it.")
    recipe: str = Field(description="Digest of the training settings that define the result.")
    saved_at: float = Field(description="Unix time.")
    save_seconds: float = Field(description="Time from the start of the save to this record.")
    versions: dict[str, str] = Field(description="Versions of the libraries that can read it.")
    files: dict[str, FileEntry] = Field(description="Every file, by path relative to the checkpoint.")


def list_files(checkpoint: Path) -> list[str]:
    """Relative paths of the files of a checkpoint, without its record."""
    files = (path for path in checkpoint.rglob("*") if path.is_file() and path.name != RECORD_NAME)
    return sorted(str(path.relative_to(checkpoint)) for path in files)


def fingerprint(path: Path, *, sync: bool = False) -> FileEntry:
    """Size and CRC-32 of a file; with ``sync`` the content is made durable first."""
    checksum = size = 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
            size += len(block)
    return FileEntry(size=size, crc32=f"{checksum:08x}")


def fingerprint_visible(path: Path, deadline_seconds: float = 60) -> FileEntry:
    """`fingerprint` with sync, waiting for a file that another node wrote to become visible on this one."""
    give_up = time.monotonic() + deadline_seconds
    while not path.exists():
        if time.monotonic() > give_up:
            raise FileNotFoundError(f"{path} was written by another node and is not visible here")
        time.sleep(0.2)
        list(path.parent.iterdir())  # makes NFS look again
    return fingerprint(path, sync=True)


def seal(checkpoint: Path, record: CheckpointRecord) -> None:
    """Make ``checkpoint`` count: sync its folders, then write its record."""
    for folder in {(checkpoint / name).parent for name in record.files}:
        fsync_directory(folder)
    write_json(checkpoint / RECORD_NAME, record.model_dump(mode="json"))
    fsync_directory(checkpoint.parent)


def read_record(checkpoint: Path) -> CheckpointRecord | None:
    """The record of a checkpoint; None if the checkpoint was never finished."""
    try:
        return CheckpointRecord.model_validate_json((checkpoint / RECORD_NAME).read_text())
    except (FileNotFoundError, ValidationError):
        return None


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoint folders below ``folder`` with their steps, newest first; finished or not."""
    found = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _FOLDER.fullmatch(path.name))]
    return sorted(found, reverse=True)


def sealed(folder: Path) -> Iterator[tuple[CheckpointRecord, Path]]:
    """The checkpoints that have a record, newest first; their files are not looked at."""
    for _, path in checkpoints(folder):
        if record := read_record(path):
            yield record, path


def problems(checkpoint: Path, *, workers: int = 4) -> list[str]:
    """What is wrong with a checkpoint, one sentence a file; empty if every byte is as recorded."""
    record = read_record(checkpoint)
    if record is None:
        return [f"{checkpoint.name} was not finished (it has no {RECORD_NAME})"]
    with ThreadPoolExecutor(workers) as pool:
        findings = pool.map(lambda item: _file_problem(checkpoint / item[0], item[1]), record.files.items())
    return [finding for finding in findings if finding]


def _file_problem(path: Path, expected: FileEntry) -> str:
    if not path.is_file():
        return f"{path} is missing"
    if (size := path.stat().st_size) != expected.size:
        return f"{path} has {size} bytes instead of {expected.size}"
    if fingerprint(path).crc32 != expected.crc32:
        return f"{path} is damaged (its checksum differs)"
    return ""


def newest_whole(folder: Path, tell: Callable[[str], None]) -> tuple[CheckpointRecord, Path] | None:
    """The newest checkpoint whose every byte is as recorded; ``tell`` hears why newer ones do not count."""
    for _, path in checkpoints(folder):
        record = read_record(path)
        if record and not (found := problems(path)):
            return record, path
        tell(f"{path.name} does not count: {'; '.join(found) if record else 'it was not finished'}")
    return None


def discard_unfinished(folder: Path, tell: Callable[[str], None]) -> None:
    """Remove what a killed save left behind."""
    for _, path in checkpoints(folder):
        if read_record(path) is None:
            tell(f"Removing {path.name}: its save was never finished")
            shutil.rmtree(path)


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the ``keep`` newest sealed checkpoints; return what went. Unfinished ones are left alone.

    The record goes first, so a kill in the middle leaves a checkpoint that does not count, not one that lies.
    """
    gone = [path for _, path in list(sealed(folder))[keep:]]
    for path in gone:
        (path / RECORD_NAME).unlink()
        shutil.rmtree(path)
    return gone
