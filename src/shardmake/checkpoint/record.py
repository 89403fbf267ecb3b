"""The record of a checkpoint and the files that it lists.

The presence of the record commits the checkpoint. Its checksums validate every file.
"""

import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from shardmake.core.atomic import unsealed
from shardmake.core.errors import CheckpointError
from shardmake.core.fingerprint import FileEntry, fingerprint

RECORD_NAME = "shardmake.json"
FOLDER = re.compile(r"checkpoint-(\d+)")
VISIBLE_SECONDS = 60.0
"""How long a network file system may take until a node sees what another has written."""


def list_files(checkpoint: Path) -> list[str]:
    """Return the relative paths of a checkpoint's files, without its record."""
    found = _walk(checkpoint) if checkpoint.is_dir() else ()
    return sorted(str(path.relative_to(checkpoint)) for path in found if path.name != RECORD_NAME)


def _walk(folder: Path, *, links: bool = False) -> Iterator[Path]:
    """Yield the files below ``folder``, without a request to the file system for each; with ``links`` all links too."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path), links=links)
            elif (links and entry.is_symlink()) or entry.is_file():
                yield Path(entry.path)


def wait_visible(path: Path, deadline_seconds: float = VISIBLE_SECONDS) -> Path:
    """Wait until a file that another node wrote is visible on this node; return ``path``."""
    deadline = time.monotonic() + deadline_seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise FileNotFoundError(f"{path} was written by another node and is not visible on this node")
        time.sleep(0.2)
        if path.parent.exists():
            list(path.parent.iterdir())  # listing the folder makes NFS refresh its cache
    return path


class CheckpointRecord(BaseModel):
    """Description of a complete checkpoint.

    Unknown fields are ignored, because a newer Shardmake of another lab member may have written the record.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: int = Field(1, description="Format of the files of a run.")
    step: int = Field(description="Optimizer steps done.")
    tokens: int = Field(description="Tokens seen, padding included.")
    samples: int = Field(0, description="Sequences seen; the data resumes there on any number of ranks.")
    data_seed: int = Field(0, description="Seed of the data order.")
    world_size: int = Field(description="Ranks that wrote it.")
    rng_states: int = Field(0, description="Ranks whose random number generators it holds.")
    strategy: str = Field(description="Strategy that sharded it.")
    attempt: int = Field(description="Attempt that wrote it.")
    settings_digest: str = Field(description="Digest of the training settings that define the result.")
    saved_at: float = Field(description="Unix time.")
    save_seconds: float = Field(description="Time from the start of the save to this record.")
    blocked_seconds: float | None = Field(None, description="Part of it in which training waited; None: all of it.")
    eval_loss: float | None = Field(None, description="Evaluation loss at this step; None without an evaluation.")
    versions: dict[str, str] = Field(description="Versions of the libraries that can read it.")
    files: dict[str, FileEntry] = Field(description="Every file, by path relative to the checkpoint.")

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())


def read_record(checkpoint: Path) -> CheckpointRecord | None:
    """Return the record of a checkpoint; None if it is missing (`is_unfinished`) or damaged.

    Raise `CheckpointError` if the user may not read the record, which does not make the checkpoint damaged.
    """
    try:
        record = CheckpointRecord.model_validate(unsealed(json.loads((checkpoint / RECORD_NAME).read_bytes())))
    except PermissionError as error:
        raise _permission_denied(error) from None
    except (OSError, ValueError):
        return None
    named = FOLDER.fullmatch(checkpoint.name)
    return None if named and int(named[1]) != record.step else record


def is_unfinished(checkpoint: Path) -> bool:
    """Return True if a checkpoint has no record; a record that cannot be read makes it damaged instead."""
    try:
        (checkpoint / RECORD_NAME).lstat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def find_problems(checkpoint: Path, *, checksums: bool = True) -> list[str]:
    """Return one sentence per damaged file of a checkpoint; an empty list if every byte is as recorded.

    Without ``checksums`` only the sizes of the files are compared, and no content is read. Raise `CheckpointError` for
    a file that the user may not read.
    """
    if is_unfinished(checkpoint):
        return [f"{checkpoint.name} was not finished (it has no {RECORD_NAME})"]
    record = read_record(checkpoint)
    if record is None:
        return [f"{checkpoint / RECORD_NAME} is damaged or cannot be read"]
    return list(find_damaged(checkpoint, record, record.files, checksums=checksums).values())


def find_damaged(
    checkpoint: Path, record: CheckpointRecord, names: Iterable[str], *, workers: int = 4, checksums: bool = True
) -> dict[str, str]:
    """Return the files among ``names`` that are not as recorded, with one sentence each; see `find_problems`."""
    listed = list(names)
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda name: file_problem(checkpoint / name, record.files[name], checksums), listed)
    return {name: problem for name, problem in zip(listed, found, strict=True) if problem}


def is_intact(record: CheckpointRecord, checkpoint: Path, name: str) -> bool:
    """Return True if one file of a checkpoint is as recorded."""
    return name in record.files and not file_problem(checkpoint / name, record.files[name])


def file_problem(path: Path, expected: FileEntry, checksums: bool = True) -> str:
    """Return how a file differs from what is ``expected``; empty if it does not. See `find_problems`."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return f"{path} is not a file"
        if found.st_size != expected.size:
            return f"{path} has {found.st_size} bytes instead of {expected.size}"
        if checksums and fingerprint(path).crc32 != expected.crc32:
            return f"{path} is damaged (its checksum differs)"
    except FileNotFoundError:
        return f"{path} is missing"
    except PermissionError as error:
        raise _permission_denied(error) from None
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return ""


def refuse_unlisted(checkpoint: Path, record: CheckpointRecord) -> None:
    """Raise `CheckpointError` if a checkpoint has a file or a link that its record does not list: a rank might load it.

    Files that NFS keeps for open ones (``.nfs*``) do not count.
    """
    there = (path for path in _walk(checkpoint, links=True) if not path.name.startswith(".nfs"))
    unlisted = sorted({str(path.relative_to(checkpoint)) for path in there} - record.files.keys() - {RECORD_NAME})
    if unlisted:
        raise CheckpointError(
            f"{checkpoint} was not loaded. {', '.join(unlisted[:3])} ({len(unlisted)} in all) is not in its record, so "
            "the save did not write it, and the training might load it. Find out who put it there, and move it away."
        )


def _permission_denied(error: PermissionError) -> CheckpointError:
    return CheckpointError(
        f"Permission denied: {error.filename}. Another user owns this file. Ask the owner to make the run's folder "
        "readable for the group (chmod -R g+rX). Nothing was removed."
    )
