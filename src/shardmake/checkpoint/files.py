"""The files of a checkpoint: their names, sizes and checksums, and that they are durable and visible on every node."""

import os
import time
from pathlib import Path

from isal.isal_zlib import crc32
from pydantic import BaseModel, ConfigDict, Field

RECORD_NAME = "shardmake.json"
BLOCK = 16 << 20
"""Bytes that one read call asks for."""


class FileEntry(BaseModel):
    """Size and checksum of one file."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    size: int = Field(description="Bytes.")
    crc32: str = Field(description="CRC-32 of the content, eight hex digits.")


def list_files(checkpoint: Path) -> list[str]:
    """Return the relative paths of a checkpoint's files, without its record."""
    files = (path for path in checkpoint.rglob("*") if path.is_file() and path.name != RECORD_NAME)
    return sorted(str(path.relative_to(checkpoint)) for path in files)


def fingerprint(path: Path, *, sync: bool = False) -> FileEntry:
    """Return size and CRC-32 of a file; with ``sync``, make its content durable first."""
    checksum = size = 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while block := file.read(BLOCK):
            checksum = crc32(block, checksum)
            size += len(block)
    return FileEntry(size=size, crc32=f"{checksum:08x}")


def wait_visible(path: Path, deadline_seconds: float = 60) -> Path:
    """Wait until a file that another node wrote is visible on this node; return ``path``."""
    deadline = time.monotonic() + deadline_seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise FileNotFoundError(f"{path} was written by another node and is not visible on this node")
        time.sleep(0.2)
        if path.parent.exists():
            list(path.parent.iterdir())  # listing the folder makes NFS refresh its cache
    return path


def sync_file(path: Path) -> int:
    """Make the content of a file durable; return its size in bytes as this node sees it."""
    with wait_visible(path).open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size
