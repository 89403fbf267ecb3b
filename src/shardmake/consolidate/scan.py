"""Read every byte of a model's folder once: the checksum of each file, and the values of each weight."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardmake.checkpoint.formats import huggingface
from shardmake.checkpoint.formats.contents import StoredTensor
from shardmake.checkpoint.formats.dtypes import CONVERTIBLE
from shardmake.consolidate.blocks import Block, page_aligned, read_into
from shardmake.core.errors import CheckpointError
from shardmake.core.manifest import FileRecord, record
from shardmake.run.paths import MODEL_RECEIPT

_BLOCK = 4 << 20
_CHUNK = 1 << 16  # elements of bf16 per check; they stay in the core's cache
_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


@dataclass(frozen=True)
class FileScan:
    """The result of one pass over a file."""

    name: str
    sums: FileRecord
    problems: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()


def scan(model: Path, workers: int) -> list[FileScan]:
    """Read every file of the folder once: its checksum and, for weights, their values."""
    weights = huggingface.shard_names(model)
    others = sorted(
        str(path.relative_to(model))
        for path in model.rglob("*")
        if path.is_file() and path.name not in {*weights, MODEL_RECEIPT} and not path.name.startswith(".")
    )
    with ThreadPoolExecutor(workers) as pool:
        scanned = pool.map(lambda name: _scan_weights(model / name), weights)
        plain = pool.map(lambda name: FileScan(name, record(model / name)), others)
        return [*scanned, *plain]


class _HashingReader:
    """Reads a file in order; another thread hashes each block while the next one is read and checked."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        self._file = os.open(path, os.O_RDONLY)
        self._hash = hashlib.sha256()
        self._buffers = [page_aligned(_BLOCK), page_aligned(_BLOCK)]
        self._pool = ThreadPoolExecutor(1)
        self._hashing = self._pool.submit(lambda: None)

    def __enter__(self) -> "_HashingReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        os.close(self._file)

    def blocks(self, end: int) -> Iterator[Block]:
        """Yield the bytes up to ``end``; a block is valid until the second block after it."""
        while self.at < end:
            self._buffers.reverse()
            got = read_into(self._buffers[0][: end - self.at], self._file, self.at)
            if not got:
                raise CheckpointError(f"{self.path} changed while it was read. Run the command again.")
            block = self._buffers[0][:got]
            self._hashing.result()
            self._hashing = self._pool.submit(self._hash.update, block.data)
            self.at += got
            yield block

    def skip(self, end: int) -> None:
        """Hash the bytes up to ``end`` without returning them."""
        for _ in self.blocks(end):
            pass

    def digest(self) -> FileRecord:
        """Return size and checksum of all bytes so far."""
        self._hashing.result()
        return FileRecord(size=self.at, sha256=self._hash.hexdigest())


def _scan_weights(path: Path) -> FileScan:
    problems: list[str] = []
    zero: list[str] = []
    with _HashingReader(path) as file:
        for tensor in sorted(huggingface.read_file(path), key=_start):
            file.skip(_start(tensor))
            finite, any_value = _scan_tensor(file, tensor)
            if not finite:
                problems.append(f"{tensor.name} holds values that are not finite (NaN or infinity)")
            if not any_value and tensor.numel and tensor.dtype in CONVERTIBLE:
                if len(tensor.shape) < 2:
                    zero.append(tensor.name)
                else:
                    problems.append(f"{tensor.name} is all zero")
        file.skip(path.stat().st_size)
        return FileScan(path.name, file.digest(), tuple(problems), tuple(zero))


def _start(tensor: StoredTensor) -> int:
    """Return the offset of a tensor of one piece in its file, 0 if it is empty."""
    return tensor.pieces[0].record.offset + tensor.pieces[0].start if tensor.pieces else 0


def _scan_tensor(file: _HashingReader, tensor: StoredTensor) -> tuple[bool, bool]:
    """Return (all values are finite, any value is not zero); bytes that two tensors share count for the first."""
    finite, end = True, _start(tensor) + tensor.nbytes
    any_value = file.at >= end
    for block in file.blocks(end):
        any_value = any_value or bool(block.any())
        finite = finite and _is_finite(block, tensor.dtype)
    return finite, any_value


def _is_finite(block: Block, dtype: str) -> bool:
    """Return True if no value is NaN or infinite; types without such values are always finite."""
    if dtype in _FLOATS:
        return bool(np.isfinite(block.view(_FLOATS[dtype])).all())
    if dtype != "BF16":
        return True
    bits = block.view(np.uint16)
    chunks = (bits[at : at + _CHUNK] & 0x7FFF for at in range(0, bits.size, _CHUNK))
    return all(chunk.max() < 0x7F80 for chunk in chunks)  # all ones in the exponent: infinity or NaN
