"""Read the files of a merged model once: their checksums and, of weights, their values."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from isal.isal_zlib import crc32, crc32_combine

from shardmake.checkpoint.formats import huggingface
from shardmake.checkpoint.formats.contents import StoredTensor
from shardmake.checkpoint.formats.dtypes import CONVERTIBLE, ITEM_SIZE
from shardmake.consolidate.blocks import Block, page_aligned, read_into
from shardmake.consolidate.layout import PlannedTensor
from shardmake.core.errors import CheckpointError
from shardmake.core.fingerprint import FileEntry, fingerprint
from shardmake.run.paths import MODEL_RECEIPT

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_CHUNK = 1 << 16  # elements of bf16 per check; they stay in the core's cache
_VALUES_BLOCK = 4 << 20


def is_finite(block: Block, dtype: str) -> bool:
    """Return True if no value is NaN or infinite; types without such values are always finite."""
    if dtype in _FLOATS:
        return bool(np.isfinite(block.view(_FLOATS[dtype])).all())
    if dtype != "BF16":
        return True
    bits = block.view(np.uint16)
    chunks = (bits[at : at + _CHUNK] & 0x7FFF for at in range(0, bits.size, _CHUNK))
    return all(chunk.max() < 0x7F80 for chunk in chunks)  # all ones in the exponent: infinity or NaN


def infinite_rows(path: Path, start: int, tensor: StoredTensor) -> int | None:
    """Return the number of rows that hold -inf and nothing else; None if any other value is not finite.

    Args:
        path: The file.
        start: Offset of the tensor's first byte in the file.
        tensor: A floating tensor. A row is the last dimension of a matrix, and an element of a vector.
    """
    width = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    size = width * ITEM_SIZE[tensor.dtype]
    at_once, count = max(1, _VALUES_BLOCK // size), 0
    with path.open("rb") as file:
        for begin in range(0, tensor.nbytes, at_once * size):
            content = os.pread(file.fileno(), min(at_once * size, tensor.nbytes - begin), start + begin)
            finite, negative = _masks(np.frombuffer(content, np.uint8), tensor.dtype)
            banned = negative.reshape(-1, width).all(axis=1)
            if not (finite.reshape(-1, width).all(axis=1) | banned).all():
                return None
            count += int(banned.sum())
    return count


def _masks(block: Block, dtype: str) -> tuple[Block, Block]:
    """Return which values are finite and which are -inf."""
    if dtype == "BF16":
        bits = block.view(np.uint16)
        return (bits & 0x7F80) != 0x7F80, bits == 0xFF80
    values = block.view(_FLOATS[dtype])
    return np.isfinite(values), np.isneginf(values)


_BLOCK = 1 << 20
"""Bytes of one read, which stay in the core's cache while they are checked."""
_PART = 64 << 20
"""Bytes that one thread checks before it takes others."""


@dataclass(frozen=True)
class FileScan:
    """The result of one pass over a file."""

    name: str
    sums: FileEntry
    tensors: Mapping[str, int] = field(default_factory=dict)
    """CRC-32 of the bytes of each tensor, by its name."""
    problems: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    zero_matrices: tuple[str, ...] = ()
    infinite_rows: Mapping[str, int] = field(default_factory=dict)
    """Number of rows of -inf, by the name of the tensor."""


def scan(model: Path, workers: int, advance: Callable[[int], None] = lambda _: None) -> list[FileScan]:
    """Read every file of the folder once: its checksum and, for weights, their values.

    ``advance`` takes the number of bytes of each weight file that was read.
    """
    huggingface.read(model)  # raises for a missing or damaged file
    weights = huggingface.shard_names(model)
    others = sorted(name for name in _visible_files(model) if name not in {*weights, MODEL_RECEIPT})
    with ThreadPoolExecutor(workers) as pool:
        scanned = [_scan_weights(model / name, pool, advance) for name in weights]
        plain = pool.map(lambda name: FileScan(name, fingerprint(model / name)), others)
        return [*(file() for file in scanned), *plain]


def _visible_files(folder: Path) -> Iterator[str]:
    """Yield the files in ``folder`` and its folders; hidden ones at the top are of a merge in progress."""
    for top in folder.iterdir():
        if not top.name.startswith("."):
            files = [path for path in (top, *top.rglob("*")) if path.is_file()]
            yield from (str(path.relative_to(folder)) for path in files if not path.name.startswith("."))


@dataclass(frozen=True)
class _Part:
    """Bytes ``[begin, end)`` of a file: of a tensor, or between tensors."""

    begin: int
    end: int
    tensor: StoredTensor | None = None


@dataclass(frozen=True)
class _PartScan:
    """The result for one part; bytes between tensors count as finite and as zero."""

    crc: int
    finite: bool
    any_value: bool


def _scan_weights(path: Path, pool: Executor, advance: Callable[[int], None]) -> Callable[[], FileScan]:
    """Start to read the file in parts; return a function that waits for its result."""
    tensors = sorted(huggingface.read_file(path), key=_start)
    parts = list(_parts(tensors, path.stat().st_size))
    found = pool.map(lambda part: _scan_part(path, part, advance), parts)
    return lambda: _summary(path, tensors, list(zip(parts, found, strict=True)))


def _parts(tensors: Iterable[StoredTensor], size: int) -> Iterator[_Part]:
    """Divide a file of ``size`` bytes; bytes that two tensors share belong to the first."""
    at = 0
    for tensor in tensors:
        start, end = max(at, _start(tensor)), max(at, _start(tensor) + tensor.nbytes)
        yield from _split(at, start)
        yield from _split(start, end, tensor)
        at = end
    yield from _split(at, size)


def _split(begin: int, end: int, tensor: StoredTensor | None = None) -> Iterator[_Part]:
    for at in range(begin, end, _PART):
        yield _Part(at, min(at + _PART, end), tensor)


def _scan_part(path: Path, part: _Part, advance: Callable[[int], None]) -> _PartScan:
    buffer, at, crc, finite, any_value = page_aligned(_BLOCK), part.begin, 0, True, False
    file = os.open(path, os.O_RDONLY)
    try:
        while at < part.end:
            got = read_into(buffer[: part.end - at], file, at)
            if not got:
                raise CheckpointError(f"{path} changed while it was read. Run the command again.")
            block = buffer[:got]
            crc, at = crc32(block.data, crc), at + got
            if part.tensor is not None:
                any_value = any_value or bool(block.any())
                finite = finite and is_finite(block, part.tensor.dtype)
    finally:
        os.close(file)
    advance(part.end - part.begin if part.tensor is not None else 0)
    return _PartScan(crc, finite, any_value)


def _summary(path: Path, tensors: Sequence[StoredTensor], found: Sequence[tuple[_Part, _PartScan]]) -> FileScan:
    by_tensor: dict[str, list[tuple[_Part, _PartScan]]] = {tensor.name: [] for tensor in tensors}
    for part, result in found:
        if part.tensor is not None:
            by_tensor[part.tensor.name].append((part, result))
    problems: list[str] = []
    infinite: dict[str, int] = {}
    for tensor in tensors:
        finite = all(result.finite for _, result in by_tensor[tensor.name])
        rows = 0 if finite else infinite_rows(path, _start(tensor), tensor)
        if rows is None:
            problems.append(f"{tensor.name} holds values that are not finite (NaN, or infinity outside of a row)")
        elif rows:
            infinite[tensor.name] = rows
    zero = [tensor for tensor in tensors if _is_zero(tensor, by_tensor[tensor.name])]
    return FileScan(
        path.name,
        FileEntry(size=found[-1][0].end, crc32=f"{_combined(found):08x}"),
        {name: _combined(parts) for name, parts in by_tensor.items()},
        tuple(problems),
        tuple(tensor.name for tensor in zero if len(tensor.shape) < 2),
        tuple(tensor.name for tensor in zero if len(tensor.shape) > 1),
        infinite,
    )


def _is_zero(tensor: StoredTensor, parts: Sequence[tuple[_Part, _PartScan]]) -> bool:
    """Return True if all values are zero; a tensor whose bytes all belong to another one is not judged."""
    return bool(parts) and tensor.dtype in CONVERTIBLE and not any(result.any_value for _, result in parts)


def _combined(parts: Iterable[tuple[_Part, _PartScan]]) -> int:
    """Return the CRC-32 of consecutive parts."""
    crc = 0
    for part, result in parts:
        crc = crc32_combine(crc, result.crc, part.end - part.begin)
    return crc


def _start(tensor: StoredTensor) -> int:
    """Return the offset of a tensor of one piece in its file, 0 if it is empty."""
    return tensor.pieces[0].record.offset + tensor.pieces[0].start if tensor.pieces else 0


class OutputSums:
    """The CRC-32 of each tensor's bytes in one output file, from parts in any order and from any thread.

    A CRC-32 is linear over GF(2): the CRC-32 of a tensor is the XOR of the CRC-32 of its parts, each one extended by as
    many bytes as follow it (``crc32_combine`` of zlib). A part that is missing gives another sum.
    """

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, rows: Block, offset: int, stride: int, target: PlannedTensor) -> None:
        """Add the bytes ``rows`` (uint8 [rows, bytes]) of ``target``.

        The first row starts at byte ``offset`` of the file, each following one ``stride`` bytes further.
        """
        crc = crc32(rows[0].data)
        table = _shift_table(stride) if len(rows) > 1 else ()
        for row in rows[1:]:
            low, second, third, high = (crc >> shift & 0xFF for shift in (0, 8, 16, 24))
            crc = table[0][low] ^ table[1][second] ^ table[2][third] ^ table[3][high] ^ crc32(row.data)
        end = offset + (len(rows) - 1) * stride + rows.shape[1]
        crc = _shifted(crc, target.offset + target.nbytes - end)
        with self._lock:
            self._sums[target.tensor.name] = self._sums.get(target.tensor.name, 0) ^ crc

    def by_tensor(self) -> Mapping[str, int]:
        """Return the CRC-32 of each tensor by name; a tensor without bytes is not in it."""
        return dict(self._sums)


def _shifted(crc: int, size: int) -> int:
    """Return the part that ``crc`` contributes to the CRC-32 of its bytes and ``size`` bytes behind them."""
    return crc32_combine(crc, 0, size) if size else crc


@lru_cache(maxsize=64)
def _shift_table(size: int) -> tuple[tuple[int, ...], ...]:
    """Return `_shifted` for each value of each of the four bytes of a CRC-32: many rows need it with one size."""
    bits = [_shifted(1 << bit, size) for bit in range(32)]
    return tuple(tuple(_xor(bits[8 * byte : 8 * byte + 8], value) for value in range(256)) for byte in range(4))


def _xor(bits: list[int], value: int) -> int:
    result = 0
    for number, bit in enumerate(bits):
        if value >> number & 1:
            result ^= bit
    return result
