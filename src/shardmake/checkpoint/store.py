"""The checkpoint ledger: a checkpoint counts once its record is in place, and the record is written last.

A record lists every file with size and CRC-32, so a truncated or bit-flipped shard is found before anything is
loaded, and resuming falls back to the checkpoint before.

A save is written into a folder beside the checkpoints and moved to its name when its record is in it. Whatever looks
at the folders alone (``get_last_checkpoint`` of transformers, a person) therefore sees whole checkpoints only.
"""

import contextlib
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardmake.core.atomic import fsync_directory, write_json
from shardmake.core.errors import ShardmakeError

RECORD_NAME = "shardmake.json"
STAGING = ".saving"
_FOLDER = re.compile(r"checkpoint-(\d+)")
BLOCK = 16 << 20
"""Bytes that are read at once."""
REMOVE_SECONDS = 5.0
_print = partial(print, flush=True)


class FileEntry(BaseModel):
    """Size and checksum of one file."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    size: int = Field(description="Bytes.")
    crc32: str = Field(description="CRC-32 of the content, eight hex digits.")


class CheckpointRecord(BaseModel):
    """What a checkpoint is; its presence says that the checkpoint is whole.

    Fields that are not known here are passed over: a newer Shardmake of somebody else in the lab may have written it.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: int = Field(description="Optimizer steps done.")
    tokens: int = Field(description="Tokens seen, padding included.")
    samples: int = Field(0, description="Sequences seen: where the data goes on, whatever the number of ranks.")
    data_seed: int = Field(0, description="Seed of the data's order.")
    world_size: int = Field(description="Ranks that wrote it.")
    rng_states: int = Field(0, description="Ranks whose random number generators it holds.")
    strategy: str = Field(description="How it is sharded.")
    attempt: int = Field(description="Attempt that wrote it.")
    recipe: str = Field(description="Digest of the training settings that define the result.")
    saved_at: float = Field(description="Unix time.")
    save_seconds: float = Field(description="Time from the start of the save to this record.")
    blocked_seconds: float | None = Field(None, description="How much of it training waited; None: all of it.")
    eval_loss: float | None = Field(None, description="Evaluation loss at this step; None without an evaluation.")
    versions: dict[str, str] = Field(description="Versions of the libraries that can read it.")
    files: dict[str, FileEntry] = Field(description="Every file, by path relative to the checkpoint.")

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: the newest, the best, and some for good."""

    keep: int = 2
    """Newest ones; at least 1."""
    best: bool = False
    """Keep the one with the lowest evaluation loss besides."""
    every_steps: int | None = None
    """Keep the first one at or after every multiple of these steps besides."""

    def kept(self, records: Sequence[CheckpointRecord]) -> set[int]:
        """Steps of ``records`` that are kept; never none of them."""
        steps = sorted((record.step for record in records), reverse=True)
        losses = {record.step: record.eval_loss for record in records if record.eval_loss is not None}
        measured = [(loss, step) for step, loss in losses.items() if math.isfinite(loss)]
        kept = set(steps[: max(1, self.keep)])
        if self.best and measured:
            kept.add(min(measured)[1])
        if self.every_steps:
            first = {step // self.every_steps: step for step in steps if step >= self.every_steps}
            kept |= set(first.values())
        return kept

    def scarce(self) -> "Retention":
        """The rule when there is no room for the next one: the newest alone, and the best."""
        return replace(self, keep=1, every_steps=None)


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
        while block := file.read(BLOCK):
            checksum = crc32(block, checksum)
            size += len(block)
    return FileEntry(size=size, crc32=f"{checksum:08x}")


def wait_visible(path: Path, deadline_seconds: float = 60) -> Path:
    """``path``, once what another node wrote there is visible on this one."""
    give_up = time.monotonic() + deadline_seconds
    while not path.exists():
        if time.monotonic() > give_up:
            raise FileNotFoundError(f"{path} was written by another node and is not visible here")
        time.sleep(0.2)
        if path.parent.exists():
            list(path.parent.iterdir())  # makes NFS look again
    return path


def sync_file(path: Path) -> int:
    """Make the content of a file durable; its size in bytes as this node sees it."""
    with wait_visible(path).open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def staging(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is written before it counts."""
    return folder / STAGING / f"checkpoint-{step}"


def commit(staged: Path, record: CheckpointRecord) -> Path:
    """Seal what was written to ``staged`` and move it to its name among the checkpoints; return that.

    The move is what makes the checkpoint count. It happens on one rank, after all have synced their files.
    """
    final = staged.parent.parent / staged.name
    if final.exists():
        set_aside(final)
    seal(staged, record)
    staged.rename(final)
    with contextlib.suppress(OSError):  # the checkpoint counts; the next save clears what is left there
        staged.parent.rmdir()
    fsync_directory(final.parent)
    return final


def finish(
    staged: Path, files: dict[str, FileEntry], described: dict[str, Any], started: float, rule: Retention
) -> None:
    """Make the checkpoint in ``staged`` count, whose ``files`` are durable, and remove what ``rule`` does not keep.

    ``described`` is what the record says besides; ``started`` is the Unix time at which the save began.
    """
    now = time.time()
    record = CheckpointRecord(
        saved_at=now,
        save_seconds=now - started,
        rng_states=sum(name.startswith("rng_state") for name in files),
        files=files,
        **described,
    )
    commit(staged, record)
    prune(staged.parent.parent, rule)


def set_aside(checkpoint: Path) -> Path:
    """Take a checkpoint off the list without deleting it; return its new name."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}-{time.time_ns()}")
    checkpoint.rename(aside)
    return aside


def seal(checkpoint: Path, record: CheckpointRecord) -> None:
    """Make ``checkpoint`` count: open its files as far as its folder is open, sync its folders, then write its record.

    Some libraries write files for their owner only, whatever the umask; the folder's mode is what the umask allows.
    """
    allowed = checkpoint.stat().st_mode & 0o666
    for name in record.files:
        _allow(checkpoint / name, allowed)
    for folder in {(checkpoint / name).parent for name in record.files}:
        fsync_directory(folder)
    write_json(checkpoint / RECORD_NAME, record.model_dump(mode="json"))
    fsync_directory(checkpoint.parent)


def _allow(path: Path, mode: int) -> None:
    """Add ``mode`` to that of a file, where the file system lets us."""
    found = stat.S_IMODE(path.stat().st_mode)
    if found & mode != mode:
        with contextlib.suppress(PermissionError):
            path.chmod(found | mode)


def read_record(checkpoint: Path) -> CheckpointRecord | None:
    """The record of a checkpoint; None if there is none (`is_unfinished`), or none that can be read.

    Raises:
        ShardmakeError: it is there, and not ours to read; that does not make it a bad one.
    """
    try:
        return CheckpointRecord.model_validate_json((checkpoint / RECORD_NAME).read_bytes())
    except PermissionError as error:
        raise _closed(error) from None
    except (OSError, ValidationError):
        return None


def is_unfinished(checkpoint: Path) -> bool:
    """Whether the save of a checkpoint never came to its record; one that cannot be read is damaged instead."""
    try:
        (checkpoint / RECORD_NAME).lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoint folders below ``folder`` with their steps, newest first; finished or not."""
    found = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _FOLDER.fullmatch(path.name))]
    return sorted(found, reverse=True)


def committed(folder: Path) -> Iterator[tuple[CheckpointRecord, Path]]:
    """The checkpoints that have a record to read, newest first; their files are not looked at."""
    for _, path in checkpoints(folder):
        if record := read_record(path):
            yield record, path


def problems(checkpoint: Path, *, workers: int = 4) -> list[str]:
    """What is wrong with a checkpoint, one sentence a file; empty if every byte is as recorded.

    Raises:
        ShardmakeError: a file is not ours to read.
    """
    if is_unfinished(checkpoint):
        return [f"{checkpoint.name} was not finished (it has no {RECORD_NAME})"]
    record = read_record(checkpoint)
    if record is None:
        return [f"{checkpoint / RECORD_NAME} is damaged or cannot be read"]
    with ThreadPoolExecutor(workers) as pool:
        findings = pool.map(lambda item: _file_problem(checkpoint / item[0], item[1]), record.files.items())
    return [finding for finding in findings if finding]


def is_intact(record: CheckpointRecord, checkpoint: Path, name: str) -> bool:
    """Whether one file of a checkpoint is as recorded."""
    return name in record.files and not _file_problem(checkpoint / name, record.files[name])


def _file_problem(path: Path, expected: FileEntry) -> str:
    try:
        if not path.is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != expected.size:
            return f"{path} has {size} bytes instead of {expected.size}"
        if fingerprint(path).crc32 != expected.crc32:
            return f"{path} is damaged (its checksum differs)"
    except PermissionError as error:
        raise _closed(error) from None
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return ""


def _closed(error: PermissionError) -> ShardmakeError:
    return ShardmakeError(
        f"{error.filename} is not yours to read. Ask whoever made it to open it to the group (chmod -R g+rX on the "
        "run's folder). Nothing was removed."
    )


def newest_valid(folder: Path, tell: Callable[[str], None]) -> tuple[CheckpointRecord, Path] | None:
    """The newest checkpoint whose every byte is as recorded; ``tell`` hears why newer ones do not count."""
    for _, path in checkpoints(folder):
        record, found = read_record(path), problems(path)
        if record and not found:
            return record, path
        tell(f"{path.name} does not count: {'; '.join(found)}")
    return None


def recover(folder: Path, tell: Callable[[str], None]) -> tuple[CheckpointRecord, Path] | None:
    """`newest_valid`, with everything newer out of the way, so that it is neither kept nor counted by mistake.

    What was never finished is removed. What was finished and is damaged, or whose record cannot be read, is set aside,
    for whoever wants to save what can be saved; it goes when the room is needed. To be called while no training is
    writing.
    """
    discard_unfinished(folder, tell)
    found = newest_valid(folder, tell)
    for step, path in checkpoints(folder):
        if found is None or step > found[0].step or read_record(path) is None:
            tell(f"{path.name} now lies in {set_aside(path).name}")
    return found


def discard_unfinished(folder: Path, tell: Callable[[str], None]) -> None:
    """Remove what a killed save left behind."""
    staged = [path for _, path in checkpoints(folder / STAGING)]
    for path in staged + [path for _, path in checkpoints(folder) if is_unfinished(path)]:
        tell(f"Removing {path.name}: its save was never finished")
        remove(path, tell)
    shutil.rmtree(folder / STAGING, ignore_errors=True)


def damaged(folder: Path) -> list[Path]:
    """What `recover` has set aside."""
    return sorted(folder.glob("damaged-checkpoint-*"))


def remove(checkpoint: Path, tell: Callable[[str], None] = _print) -> bool:
    """Remove a checkpoint, its record first: a kill in the middle leaves one that does not count, not one that lies.

    A process that is dying may still write into it, and NFS keeps files that are open: it is tried again for
    `REMOVE_SECONDS`. Returns whether it is gone; ``tell`` hears what stays, and why.
    """
    give_up = time.monotonic() + REMOVE_SECONDS
    while True:
        try:
            (checkpoint / RECORD_NAME).unlink(missing_ok=True)
            shutil.rmtree(checkpoint)
            return True
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not checkpoint.exists():
                return True
            if isinstance(error, PermissionError) or time.monotonic() > give_up:
                tell(f"{error.filename} could not be removed ({error.strerror}); it stays.")
                return False
        time.sleep(0.2)


def prune(folder: Path, rule: Retention) -> list[Path]:
    """Remove the sealed checkpoints that ``rule`` does not keep; return what went. Unfinished ones are left alone."""
    found = list(committed(folder))
    kept = rule.kept([record for record, _ in found])
    return [path for record, path in found if record.step not in kept and remove(path)]
