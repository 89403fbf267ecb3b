"""Read the files of a merged model once: their checksums and, of weights, their values."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
from isal.isal_zlib import crc32, crc32_combine

from shardmake.checkpoint.formats import huggingface
from shardmake.checkpoint.formats.contents import Contents, StoredTensor
from shardmake.checkpoint.formats.dtypes import CONVERTIBLE, ITEM_SIZE
from shardmake.consolidate.blocks import Block, page_aligned, read_into
from shardmake.consolidate.layout import PlannedTensor
from shardmake.consolidate.stream import combine_crc32
from shardmake.core.errors import CheckpointError
from shardmake.core.fingerprint import FileEntry, fingerprint
from shardmake.run.paths import MODEL_RECEIPT

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_BLOCK = 1 << 18
"""Bytes of one read, which stay in the core's cache while they are checked."""
_PART = 64 << 20
"""Bytes that one thread checks before it takes others."""


@dataclass
class ModelScan:
    """The result of one pass over a model's files."""

    contents: Contents
    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)
    """CRC-32 of the bytes of each tensor, by its name."""
    problems: list[str] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)
    zero_matrices: list[str] = field(default_factory=list)
    infinite_rows: dict[str, int] = field(default_factory=dict)
    """Number of rows of -inf, by the name of the tensor."""

    def add(self, tensor: StoredTensor, parts: list["_Part"]) -> None:
        """Add a tensor that has bytes of its own."""
        self.tensors[tensor.name] = _crc_of(parts)
        rows = 0 if all(part.finite for part in parts) else infinite_rows(tensor)
        if rows is None:
            problem = "holds values that are not finite (NaN, or infinity outside of a row)"
            self.problems.append(f"{tensor.name} {problem}")
        elif rows:
            self.infinite_rows[tensor.name] = rows
        if tensor.dtype in CONVERTIBLE and not any(part.any_value for part in parts):
            (self.zero_matrices if len(tensor.shape) > 1 else self.zero).append(tensor.name)


@dataclass(frozen=True)
class _Part:
    """Bytes ``[begin, end)`` of a file, and what they hold; bytes between tensors count as finite and as zero."""

    begin: int
    end: int
    tensor: StoredTensor | None = None
    crc: int = 0
    finite: bool = True
    any_value: bool = False


def scan(model: Path, workers: int, advance: Callable[[int], None] = lambda _: None) -> ModelScan:
    """Read every file of the folder once: its checksum and, for weights, their values.

    ``advance`` takes the number of bytes of each weight file that was read.
    """
    found = ModelScan(huggingface.read(model))  # raises for a missing or damaged file
    weights = huggingface.shard_names(model)
    others = sorted(name for name in _visible_files(model) if name not in {*weights, MODEL_RECEIPT})
    with ThreadPoolExecutor(workers) as pool:
        by_file = [
            pool.map(partial(_scan_part, model / name, advance), _parts(model / name, found.contents))
            for name in weights
        ]
        entries = pool.map(lambda name: fingerprint(model / name), others)
        for name, scanned in zip(weights, by_file, strict=True):
            parts = list(scanned)
            found.files[name] = FileEntry(size=parts[-1].end, crc32=f"{_crc_of(parts):08x}")
            for tensor, of_tensor in groupby(parts, lambda part: part.tensor):
                if tensor is not None:
                    found.add(tensor, list(of_tensor))
        found.files |= zip(others, entries, strict=True)
    return found


def _visible_files(folder: Path) -> Iterator[str]:
    """Yield the files in ``folder`` and its folders; hidden ones at the top are of a merge in progress."""
    for top in folder.iterdir():
        if not top.name.startswith("."):
            files = [path for path in (top, *top.rglob("*")) if path.is_file()]
            yield from (str(path.relative_to(folder)) for path in files if not path.name.startswith("."))


def _parts(path: Path, contents: Contents) -> Iterator[_Part]:
    """Divide the file at ``path``; bytes that two tensors share belong to the first."""
    at = 0
    held = (tensor for tensor in contents.tensors.values() if tensor.pieces and tensor.pieces[0].record.path == path)
    for tensor in sorted(held, key=lambda tensor: tensor.offset):
        start, end = max(at, tensor.offset), max(at, tensor.offset + tensor.nbytes)
        yield from _split(at, start)
        yield from _split(start, end, tensor)
        at = end
    yield from _split(at, path.stat().st_size)


def _split(begin: int, end: int, tensor: StoredTensor | None = None) -> Iterator[_Part]:
    for at in range(begin, end, _PART):
        yield _Part(at, min(at + _PART, end), tensor)


def _scan_part(path: Path, advance: Callable[[int], None], part: _Part) -> _Part:
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
                finite = finite and (part.tensor.dtype not in _FLOATS or bool(_finite(block, part.tensor.dtype).all()))
    finally:
        os.close(file)
    advance(part.end - part.begin if part.tensor is not None else 0)
    return replace(part, crc=crc, finite=finite, any_value=any_value)


def _crc_of(parts: Iterable[_Part]) -> int:
    return combine_crc32((part.crc, part.end - part.begin) for part in parts)


def _finite(block: Block, dtype: str) -> Block:
    """Return which values are finite: neither NaN nor infinite, whose exponent is all ones in BF16."""
    values = block.view(_FLOATS[dtype])
    return (values & 0x7F80) != 0x7F80 if dtype == "BF16" else np.isfinite(values)


def infinite_rows(tensor: StoredTensor) -> int | None:
    """Return the number of rows of -inf alone in a floating tensor of one piece; None if another value is not finite.

    A row is the last dimension of a matrix, and an element of a vector.
    """
    width = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    size = width * ITEM_SIZE[tensor.dtype]
    at_once, count = max(1, _BLOCK // size), 0
    with tensor.pieces[0].record.path.open("rb") as file:
        for begin in range(0, tensor.nbytes, at_once * size):
            content = os.pread(file.fileno(), min(at_once * size, tensor.nbytes - begin), tensor.offset + begin)
            block = np.frombuffer(content, np.uint8)
            values = block.view(_FLOATS[tensor.dtype]).reshape(-1, width)
            banned = (values == 0xFF80 if tensor.dtype == "BF16" else np.isneginf(values)).all(axis=1)
            if not (_finite(block, tensor.dtype).reshape(-1, width).all(axis=1) | banned).all():
                return None
            count += int(banned.sum())
    return count


class OutputSums:
    """The CRC-32 of each tensor's bytes in one output file, from parts in any order and from any thread.

    A CRC-32 is linear over GF(2): the CRC-32 of a tensor is the XOR of the CRC-32 of its parts, each one extended by as
    many bytes as follow it (``crc32_combine`` of zlib). A part that is missing gives another sum.
    """

    def __init__(self) -> None:
        self.by_tensor: dict[str, int] = {}
        """The CRC-32 of each tensor by name; a tensor without bytes is not in it."""
        self._lock = threading.Lock()

    def add(self, rows: Block, offset: int, stride: int, target: PlannedTensor) -> None:
        """Add the bytes ``rows`` (uint8 [rows, bytes]) of ``target``.

        The first row starts at byte ``offset`` of the file, each following one ``stride`` bytes further.
        """
        crc = 0
        for row in rows:
            crc = crc32_combine(crc, 0, stride) ^ crc32(row.data)
        end = offset + (len(rows) - 1) * stride + rows.shape[1]
        crc = crc32_combine(crc, 0, target.offset + target.nbytes - end)
        with self._lock:
            self.by_tensor[target.tensor.name] = self.by_tensor.get(target.tensor.name, 0) ^ crc
