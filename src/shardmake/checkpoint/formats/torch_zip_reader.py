"""The zip archives that ``torch.save`` writes: the offset and CRC-32 of each record.

torch stores records uncompressed and aligned, with a CRC-32 in the zip directory that torch never checks.
Small records are compared with it here, those of tensors while they are copied.
`zipfile` reads the directory. Layout of an entry: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT (4.3.7).
"""

import io
import os
import stat
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmake.core.errors import CheckpointError

_END_SIZE = 22
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
"""The header of an entry, which ends with the lengths of its name and of its extra field."""
_LARGEST_PICKLE = 512 << 20
"""Bytes of a pickle or another small record. That of a 70B model on 512 ranks has about 70 MB."""
_LARGEST_DIRECTORY = 32 << 20
"""Bytes of a zip directory; one entry has about 100."""


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A byte range of a file: the storage of a tensor.

    Attributes:
        crc: The CRC-32 in the file itself, None if it has none.
        archive_length: Length of the archive into which DCP wraps each tensor. ``offset`` is then the start of that
            archive, and `unpickle.locate` finds the bytes in it.
    """

    path: Path
    offset: int
    size: int
    crc: int | None
    archive_length: int | None = None


class FileRange(io.RawIOBase):
    """Bytes ``[start, start + length)`` of an open file, for `zipfile`."""

    def __init__(self, file: int, start: int, length: int) -> None:
        self.file, self.start, self.length, self.at = file, start, length, 0

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position as `io.IOBase.seek` does, and return it."""
        self.at = offset + (0, self.at, self.length)[whence]
        if self.at < 0:
            raise zipfile.BadZipFile("negative offset")
        return self.at

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes; a forged size allocates nothing."""
        left = max(0, self.length - self.at)
        size = left if size < 0 else min(size, left)
        if size > _LARGEST_DIRECTORY:
            raise zipfile.BadZipFile("directory too large")
        return super().read(size) or b""

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` as far as the range goes; return the number of bytes."""
        count = os.preadv(self.file, [memoryview(buffer)[: max(0, self.length - self.at)]], self.start + self.at)
        self.at += count
        return count


def open_regular(path: Path) -> int:
    """Open a file for reading and return its descriptor; raise `CheckpointError` for a pipe, a device or a folder."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}. Copy the checkpoint again.") from None
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise CheckpointError(f"Cannot read {path}. It is not a regular file. Copy the checkpoint again.")


def read_small(path: Path, offset: int = 0, size: int | None = None) -> bytes:
    """Return ``size`` bytes of a file from ``offset`` on, by default all of it; they must not hold tensors."""
    file = open_regular(path)
    try:
        size = os.fstat(file).st_size if size is None else size
        if size > _LARGEST_PICKLE:
            raise CheckpointError(
                f"Cannot read {path}. Its description of the tensors has {size} bytes; the limit is {_LARGEST_PICKLE}. "
                "The file is damaged, or was not written by torch. Use another checkpoint."
            )
        return os.pread(file, size, offset)
    finally:
        os.close(file)


def read_record(record: ZipRecord) -> bytes:
    """Return the bytes of a small record and compare their checksum; raise `CheckpointError` if it differs."""
    content = read_small(record.path, record.offset, record.size)
    if len(content) != record.size or (record.crc is not None and zlib.crc32(content) != record.crc):
        raise damaged_bytes(str(record.path), record.offset, record.size)
    return content


def damaged_bytes(file: str, offset: int, size: int) -> CheckpointError:
    """Return the error for bytes that do not match the CRC-32 in their file."""
    return CheckpointError(
        f"{file} is damaged: the {size} bytes from byte {offset} on do not match the CRC-32 in the file (a flipped bit "
        "on the disk or in transfer). Copy it again, or use an older checkpoint."
    )


class ZipArchive:
    """One ``torch.save`` archive: a whole file, or in DCP a range ``[start, start + length)`` of a file."""

    def __init__(self, path: Path, start: int = 0, length: int | None = None) -> None:
        """Read the directory of the archive; raise `CheckpointError` if it is empty, truncated or not a zip archive."""
        self.path, self.start = path, start
        self._file = open_regular(path)
        try:
            self.length = os.fstat(self._file).st_size - start if length is None else length
            self.entries = self._read_directory()
            """The entries by name, without the archive's own folder."""
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> "ZipArchive":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def record(self, name: str) -> ZipRecord:
        """Return the byte range of the record ``name`` (without the archive's own folder, such as ``data/0``)."""
        if name not in self.entries:
            raise CheckpointError(
                f"{self.path} holds no record {name!r}. The file is damaged or was not written by torch.save. "
                "Use another checkpoint."
            )
        entry = self.entries[name]
        header = _LOCAL_HEADER.unpack(self._read(entry.header_offset, _LOCAL_HEADER.size))
        offset = entry.header_offset + _LOCAL_HEADER.size + header[-2] + header[-1]
        if header[0] != b"PK\x03\x04" or offset + entry.file_size > self.length:
            raise self._damaged(f"record {name} is not at the offset in the directory")
        return ZipRecord(self.path, self.start + offset, entry.file_size, entry.CRC)

    def read(self, name: str) -> bytes:
        """Return the bytes of a small record; raise `CheckpointError` if they do not have the checksum in the file."""
        return read_record(self.record(name))

    def _read(self, offset: int, size: int) -> bytes:
        content = os.pread(self._file, size, self.start + offset) if offset >= 0 else b""
        if len(content) != size:
            raise self._damaged("it is truncated")
        return content

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is damaged ({reason}; {self.length} bytes). The checkpoint was not written or copied "
            "completely. Use an older checkpoint, or copy this file again."
        )

    def _read_directory(self) -> dict[str, zipfile.ZipInfo]:
        if self.length == 0:
            raise self._damaged("it is empty")
        if self._read(0, min(4, self.length)) != b"PK\x03\x04":
            raise CheckpointError(
                f"{self.path} is not a zip archive of torch.save. The format before torch 1.6 is not supported. "
                "Load the file with torch and save it again."
            )
        if self._read(self.length - _END_SIZE, 4) != b"PK\x05\x06":  # torch writes no archive comment behind it
            raise self._damaged("the directory at its end is missing")
        try:
            entries = zipfile.ZipFile(FileRange(self._file, self.start, self.length)).infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OSError):  # as `zipfile` rejects it
            raise self._damaged("its directory is truncated") from None
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise self._damaged(f"the entry {entry.filename!r} is not one that torch writes")
        named = {entry.filename.partition("/")[2]: entry for entry in entries}
        if len(named) < len(entries):
            raise self._damaged("its directory names a record twice")
        return named
