"""The layout of a file that ``torch.load`` reads, fixed before its tensors are there. Pure.

A zip archive as ``torch.save`` writes it: a pickle that says what the tensors are, some small records, and one
uncompressed record per tensor, on multiples of 64 bytes. Only the CRC-32s of the tensors are missing until these are
written, so what holds them comes last: the header before each tensor's record, and the directory at the end.
Zip: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.7 to 4.3.16 and, for files beyond 4 GiB, 4.5.3.
"""

import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from isal.isal_zlib import crc32

from shardmake.checkpoint.formats.dtypes import FROM_STORAGE, ITEM_SIZE, torch_name
from shardmake.checkpoint.formats.unpickle import row_major

_ALIGNMENT = 64  # bytes, as torch does, so that a record can be mapped into memory
_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_IN_ZIP64 = 0xFFFFFFFF  # "see the zip64 field"
_VERSION = 45  # of the zip format, the first with zip64
_DATE = (1 << 5) | 1  # 1 January 1980: a file's bytes depend on its tensors alone
_FOLDER = "archive"
_ORDERED = b"ccollections\nOrderedDict\n)R"
_STORAGE = {dtype: storage for storage, dtype in FROM_STORAGE.items()}


@dataclass(frozen=True)
class PlannedRecord:
    """One record: its name, where its local header begins, where its bytes begin, and how many they are."""

    name: str
    header: int
    begin: int
    size: int


@dataclass(frozen=True)
class ZipPlan:
    """The file: what it starts with (all but the tensors), the records of all, and its size in bytes."""

    start: bytes
    small: Mapping[str, int]
    records: tuple[PlannedRecord, ...]
    size: int

    def closing(self, sums: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """What is still to be written, and where, once the CRC-32 of each tensor is known (in their order)."""
        tensors = self.records[len(self.small) :]
        for record, crc in zip(tensors, sums, strict=True):
            yield record.header, _local(record, crc)
        end = self.records[-1].begin + self.records[-1].size
        yield end, _directory(self.records, [*self.small.values(), *sums], end)


def plan(tensors: Sequence[tuple[str, str, tuple[int, ...], int]]) -> ZipPlan:
    """The file that holds ``tensors``, each given as its name, type, shape and size in bytes."""
    contents = {
        "data.pkl": _pickle(tensors),
        ".format_version": b"1",
        ".storage_alignment": str(_ALIGNMENT).encode(),
        "byteorder": b"little",
        "version": b"3\n",
    }
    sizes = [(name, len(content)) for name, content in contents.items()]
    sizes += [(f"data/{index}", size) for index, (*_, size) in enumerate(tensors)]
    records: list[PlannedRecord] = []
    at = 0
    for name, size in sizes:
        records.append(_place(name, at, size))
        at = records[-1].begin + size
    sums = {name: crc32(content) for name, content in contents.items()}
    start = b"".join(_local(record, sums[record.name]) + contents[record.name] for record in records[: len(contents)])
    return ZipPlan(start, sums, tuple(records), at + len(_directory(records, [0] * len(records), at)))


def _place(name: str, at: int, size: int) -> PlannedRecord:
    """The record whose local header begins at ``at``; a field of padding before its bytes, as torch has it."""
    bare = at + _LOCAL.size + len(f"{_FOLDER}/{name}") + 20 + 4  # the zip64 field, the padding's own header
    return PlannedRecord(name, at, bare + -bare % _ALIGNMENT, size)


def _local(record: PlannedRecord, crc: int) -> bytes:
    name = f"{_FOLDER}/{record.name}".encode()
    extra = struct.pack("<2H2Q", 1, 16, record.size, record.size)
    padding = record.begin - record.header - _LOCAL.size - len(name) - len(extra) - 4
    extra += struct.pack("<2s1H", b"FB", padding) + b"Z" * padding
    sizes = (crc, _IN_ZIP64, _IN_ZIP64, len(name), len(extra))
    return _LOCAL.pack(b"PK\x03\x04", _VERSION, 0, 0, 0, _DATE, *sizes) + name + extra


def _directory(records: Sequence[PlannedRecord], sums: Sequence[int], at: int) -> bytes:
    """The directory, which begins at byte ``at``, and what ends the archive."""
    entries = b"".join(_entry(record, crc) for record, crc in zip(records, sums, strict=True))
    count, end = len(records), at + len(entries)
    return (
        entries
        + _END64.pack(b"PK\x06\x06", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, len(entries), at)
        + _LOCATOR.pack(b"PK\x06\x07", 0, end, 1)
        + _END.pack(b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, _IN_ZIP64, _IN_ZIP64, 0)
    )


def _entry(record: PlannedRecord, crc: int) -> bytes:
    name = f"{_FOLDER}/{record.name}".encode()
    extra = struct.pack("<2H3Q", 1, 24, record.size, record.size, record.header)
    sizes = (crc, _IN_ZIP64, _IN_ZIP64, len(name), len(extra))
    return _ENTRY.pack(b"PK\x01\x02", _VERSION, _VERSION, 0, 0, 0, _DATE, *sizes, 0, 0, 0, 0, _IN_ZIP64) + name + extra


def _pickle(tensors: Sequence[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """An ordered dictionary of tensors in pickle's protocol 2, put together without torch."""
    items = (
        _value(name) + _tensor(index, dtype, shape, size) for index, (name, dtype, shape, size) in enumerate(tensors)
    )
    return b"\x80\x02" + _ORDERED + b"(" + b"".join(items) + b"u."


def _tensor(index: int, dtype: str, shape: tuple[int, ...], size: int) -> bytes:
    """A call of the function with which torch rebuilds a tensor; types without a storage class name theirs last."""
    typed = dtype in _STORAGE
    storage = f"ctorch\n{_STORAGE[dtype]}\n" if typed else "ctorch.storage\nUntypedStorage\n"
    length = _value(size // ITEM_SIZE[dtype] if typed else size)
    place = b"(" + _value("storage") + storage.encode() + _value(str(index)) + _value("cpu") + length + b"tQ"
    function = f"ctorch._utils\n_rebuild_tensor_v{2 if typed else 3}\n".encode()
    arguments = place + _value(0) + _value(shape) + _value(row_major(shape)) + _value(False) + _ORDERED
    return function + b"(" + arguments + (b"" if typed else f"ctorch\n{torch_name(dtype)}\n".encode()) + b"tR"


def _value(value: object) -> bytes:
    """A number, text or tuple of numbers, without what makes a pickle of its own of it."""
    return pickle.dumps(value, 2)[2:-1]
