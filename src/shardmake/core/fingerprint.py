"""Size and CRC-32 of a file: they detect damage at the speed of memory."""

import os
from pathlib import Path

from isal.isal_zlib import crc32
from pydantic import BaseModel, ConfigDict, Field

BLOCK = 16 << 20
"""Bytes that one read call asks for."""


class FileEntry(BaseModel):
    """Size and checksum of one file."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    size: int = Field(description="Bytes.")
    crc32: str = Field(description="CRC-32 of the content, eight hex digits.")


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
