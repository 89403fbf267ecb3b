"""How results are written: to a temporary name, fsynced, renamed, and only when the content changed.

A reader therefore sees the old file or the new one, never half of either, also after a power cut; and an unchanged
file keeps its modification time, so that Snakemake reruns nothing for nothing.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from shardmake.core.errors import ShardmakeError


def write_bytes(path: Path, content: bytes) -> bool:
    """Put ``content`` at ``path`` atomically and durably; return whether the file changed.

    The temporary name carries host and process id, so two writers of one path do not collide; the last rename wins.
    """
    if path.is_file() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    fsync_directory(path.parent)
    return True


def write_text(path: Path, text: str) -> bool:
    """`write_bytes` of UTF-8 text."""
    return write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> bool:
    """`write_bytes` of indented JSON; the order of keys is kept."""
    return write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path, made_by: str) -> Any:
    """The JSON at ``path``; ``made_by`` names the stage that writes it, for the error when it is not there."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ShardmakeError(f"{path} is not there yet. It is written by: {made_by}") from None
    except json.JSONDecodeError as error:
        raise ShardmakeError(f"{path} is not valid JSON ({error}). Remove it and run again: {made_by}") from None


def fsync_directory(folder: Path) -> None:
    """Make a rename or a new name in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Hex digest of a file's content, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """Short hex digest of a JSON-like value, equal for equal values whatever the order of their keys."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
