"""The zip archives that ``torch.save`` writes: where each record lies on disk, and its CRC-32.

torch stores records uncompressed and aligned, and puts a CRC-32 of each into the zip directory, but never checks it
when it loads. Layout: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT (4.3.7, 4.3.12 to 4.3.16).
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from shardmake.core.errors import ShardmakeError

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")


@dataclass(frozen=True)
class ZipRecord:
    """A byte range on disk that is read as one: the storage of a tensor.

    Attributes:
        path: The file.
        offset: Where the bytes start in the file.
        size: How many they are.
        crc: The CRC-32 that the file itself holds of them, None where it holds none.
        box: Where DCP wraps each tensor into an archive of its own: the length of that archive. ``offset`` is then
            where the archive starts, and `unpickle.unbox` says where the bytes are.
    """

    path: Path
    offset: int
    size: int
    crc: int | None
    box: int | None = None


@dataclass(frozen=True)
class _Entry:
    header: int  # of the local header, from the archive's start
    size: int
    crc: int


class ZipArchive:
    """One ``torch.save`` archive, a file or (in DCP) a range ``[start, start + length)`` of one."""

    def __init__(self, path: Path, start: int = 0, length: int | None = None) -> None:
        """Read the directory of the archive; ShardmakeError names a file that is empty, cut off or of another kind."""
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
        """Where the record ``name`` (without the archive's own folder, such as ``data/0``) lies in the file."""
        if name not in self._entries:
            raise ShardmakeError(f"{self.path} holds no record {name!r}: the file is damaged or not from torch.save.")
        entry = self._entries[name]
        magic, *_, name_length, extra_length = _LOCAL.unpack(self._read(entry.header, _LOCAL.size))
        offset = entry.header + _LOCAL.size + name_length + extra_length
        if magic != b"PK\x03\x04" or offset + entry.size > self.length:
            raise self._damaged(f"record {name} does not lie where the directory says")
        return ZipRecord(self.path, self.start + offset, entry.size, entry.crc)

    def read(self, name: str) -> bytes:
        """The bytes of a small record."""
        record = self.record(name)
        return os.pread(self._file, record.size, record.offset)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def _read(self, offset: int, size: int) -> bytes:
        content = os.pread(self._file, size, self.start + offset) if offset >= 0 else b""
        if len(content) != size:
            raise self._damaged("it is cut off")
        return content

    def _damaged(self, what: str) -> ShardmakeError:
        return ShardmakeError(
            f"{self.path} is damaged ({what}; {self.length} bytes): the checkpoint was not written to its end, "
            "or not copied whole. Take an older checkpoint, or copy this file again."
        )

    def _read_directory(self) -> dict[str, _Entry]:
        if self.length == 0:
            raise self._damaged("it is empty")
        if self._read(0, min(4, self.length)) != b"PK\x03\x04":
            raise ShardmakeError(
                f"{self.path} is no zip archive as torch.save writes them. Files in the format from before torch 1.6 "
                "are not read: load the file with torch and save it again."
            )
        count, size, offset = self._read_end()
        directory = self._read(offset, size)
        entries, at = {}, 0
        for _ in range(count):
            name, entry, at = self._parse_entry(directory, at)
            entries[name.partition("/")[2]] = entry
        return entries

    def _read_end(self) -> tuple[int, int, int]:
        """Number of entries, size and offset of the directory. torch writes no archive comment."""
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

    def _parse_entry(self, directory: bytes, at: int) -> tuple[str, _Entry, int]:
        try:
            fields = _ENTRY.unpack_from(directory, at)
        except struct.error:
            raise self._damaged("its directory is cut off") from None
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
        return name, _Entry(header, size, crc), at + name_length + extra_length + comment_length


def _zip64(extra: bytes, packed: int, size: int, header: int) -> tuple[int, int, int]:
    """The 64-bit values, in the order of APPNOTE 4.5.3; only those that did not fit are there."""
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
