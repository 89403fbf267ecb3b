"""The zip archives that ``torch.save`` writes: the offset and CRC-32 of each record.

torch stores records uncompressed and aligned, with a CRC-32 in the zip directory that torch never checks.
Layout: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT (4.3.7, 4.3.12 to 4.3.16).
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from shardmake.core.errors import CheckpointError

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")


@dataclass(frozen=True)
class ZipRecord:
    """A byte range on disk: the storage of a tensor.

    Attributes:
        path: The file.
        offset: Offset of the first byte in the file.
        size: Number of bytes.
        crc: The CRC-32 in the file itself, None if it has none.
        archive_length: Length of the archive into which DCP wraps each tensor. ``offset`` is then the start of that
            archive, and `unpickle.locate` finds the bytes in it.
    """

    path: Path
    offset: int
    size: int
    crc: int | None
    archive_length: int | None = None


@dataclass(frozen=True)
class _ZipEntry:
    header: int  # offset of the local header from the archive's start
    size: int
    crc: int


class ZipArchive:
    """One ``torch.save`` archive: a whole file, or in DCP a range ``[start, start + length)`` of a file."""

    def __init__(self, path: Path, start: int = 0, length: int | None = None) -> None:
        """Read the directory of the archive; raise `CheckpointError` if it is empty, truncated or not a zip archive."""
        self.path, self.start = path, start
        self._file = os.open(path, os.O_RDONLY)
        try:
            self.length = os.fstat(self._file).st_size - start if length is None else length
            self._entries = self._read_directory()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> "ZipArchive":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def record(self, name: str) -> ZipRecord:
        """Return the byte range of the record ``name`` (without the archive's own folder, such as ``data/0``)."""
        if name not in self._entries:
            raise CheckpointError(
                f"{self.path} holds no record {name!r}. The file is damaged or was not written by torch.save. "
                "Use another checkpoint."
            )
        entry = self._entries[name]
        magic, *_, name_length, extra_length = _LOCAL.unpack(self._read(entry.header, _LOCAL.size))
        offset = entry.header + _LOCAL.size + name_length + extra_length
        if magic != b"PK\x03\x04" or offset + entry.size > self.length:
            raise self._damaged(f"record {name} is not at the offset in the directory")
        return ZipRecord(self.path, self.start + offset, entry.size, entry.crc)

    def read(self, name: str) -> bytes:
        """Return the bytes of a small record."""
        record = self.record(name)
        return os.pread(self._file, record.size, record.offset)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

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

    def _read_directory(self) -> dict[str, _ZipEntry]:
        if self.length == 0:
            raise self._damaged("it is empty")
        if self._read(0, min(4, self.length)) != b"PK\x03\x04":
            raise CheckpointError(
                f"{self.path} is not a zip archive of torch.save. The format before torch 1.6 is not supported. "
                "Load the file with torch and save it again."
            )
        count, size, offset = self._read_end()
        directory = self._read(offset, size)
        entries, at = {}, 0
        for _ in range(count):
            name, entry, at = self._parse_entry(directory, at)
            entries[name.partition("/")[2]] = entry
        return entries

    def _read_end(self) -> tuple[int, int, int]:
        """Return the number of entries, the size and the offset of the directory; torch writes no archive comment."""
        at = self.length - _END.size
        magic, *_, count, size, offset, _comment = _END.unpack(self._read(at, _END.size))
        if magic != b"PK\x05\x06":
            raise self._damaged("the directory at its end is missing")
        if 0xFFFF not in (count,) and 0xFFFFFFFF not in (size, offset):
            return count, size, offset
        magic, _, at64, _ = _LOCATOR.unpack(self._read(at - _LOCATOR.size, _LOCATOR.size))
        end = _END64.unpack(self._read(at64, _END64.size))
        if magic != b"PK\x06\x07" or end[0] != b"PK\x06\x06":
            raise self._damaged("the directory at its end is missing")
        return end[7], end[8], end[9]

    def _parse_entry(self, directory: bytes, at: int) -> tuple[str, _ZipEntry, int]:
        try:
            fields = _ENTRY.unpack_from(directory, at)
        except struct.error:
            raise self._damaged("its directory is truncated") from None
        magic, method, crc, packed, size = fields[0], fields[4], *fields[7:10]
        name_length, extra_length, comment_length = fields[10:13]
        header = fields[16]
        at += _ENTRY.size
        name = directory[at : at + name_length].decode(errors="replace")
        extra = directory[at + name_length : at + name_length + extra_length]
        if 0xFFFFFFFF in (packed, size, header):
            packed, size, header = _zip64(extra, packed, size, header)
        if magic != b"PK\x01\x02" or method != 0 or packed != size:
            raise self._damaged(f"the entry {name!r} is not one that torch writes")
        return name, _ZipEntry(header, size, crc), at + name_length + extra_length + comment_length


def _zip64(extra: bytes, packed: int, size: int, header: int) -> tuple[int, int, int]:
    """Return the 64-bit values, in the order of APPNOTE 4.5.3; the field holds only those that did not fit."""
    values: list[int] = []
    while len(extra) >= 4:
        tag, length = struct.unpack_from("<2H", extra)
        if tag == 1:
            values = list(struct.unpack_from(f"<{length // 8}Q", extra, 4))
        extra = extra[4 + length :]
    following = iter(values)
    size = next(following, size) if size == 0xFFFFFFFF else size
    packed = next(following, packed) if packed == 0xFFFFFFFF else packed
    header = next(following, header) if header == 0xFFFFFFFF else header
    return packed, size, header
