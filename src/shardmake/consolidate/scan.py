"""Read the files of a merged model once: their checksums and, of weights, their values."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from isal.isal_zlib import crc32

from shardmake.checkpoint.formats import huggingface
from shardmake.checkpoint.formats.contents import StoredTensor
from shardmake.checkpoint.formats.dtypes import CONVERTIBLE
from shardmake.consolidate.blocks import Block, page_aligned, read_into
from shardmake.consolidate.values import infinite_rows, is_finite
from shardmake.core.errors import CheckpointError
from shardmake.core.manifest import FileRecord, record
from shardmake.run.paths import MODEL_RECEIPT

_BLOCK = 4 << 20


@dataclass(frozen=True)
class FileScan:
    """The result of one pass over a file."""

    name: str
    sums: FileRecord
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
        scanned = pool.map(lambda name: _scan_weights(model / name, advance), weights)
        plain = pool.map(lambda name: FileScan(name, record(model / name)), others)
        return [*scanned, *plain]


def _visible_files(folder: Path) -> Iterator[str]:
    """Yield the files in ``folder`` and its folders; hidden ones at the top are of a merge in progress."""
    for top in folder.iterdir():
        if not top.name.startswith("."):
            files = [path for path in (top, *top.rglob("*")) if path.is_file()]
            yield from (str(path.relative_to(folder)) for path in files if not path.name.startswith("."))


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


def _scan_weights(path: Path, advance: Callable[[int], None]) -> FileScan:
    problems: list[str] = []
    zero: list[StoredTensor] = []
    infinite: dict[str, int] = {}
    sums: dict[str, int] = {}
    with _HashingReader(path) as file:
        for tensor in sorted(huggingface.read_file(path), key=_start):
            file.skip(_start(tensor))
            finite, any_value, sums[tensor.name] = _scan_tensor(file, tensor)
            advance(tensor.nbytes)
            rows = 0 if finite else infinite_rows(path, _start(tensor), tensor)
            if rows is None:
                problems.append(f"{tensor.name} holds values that are not finite (NaN, or infinity outside of a row)")
            elif rows:
                infinite[tensor.name] = rows
            if not any_value and tensor.numel and tensor.dtype in CONVERTIBLE:
                zero.append(tensor)
        file.skip(path.stat().st_size)
        vectors = tuple(tensor.name for tensor in zero if len(tensor.shape) < 2)
        matrices = tuple(tensor.name for tensor in zero if len(tensor.shape) > 1)
        return FileScan(path.name, file.digest(), sums, tuple(problems), vectors, matrices, infinite)


def _start(tensor: StoredTensor) -> int:
    """Return the offset of a tensor of one piece in its file, 0 if it is empty."""
    return tensor.pieces[0].record.offset + tensor.pieces[0].start if tensor.pieces else 0


def _scan_tensor(file: _HashingReader, tensor: StoredTensor) -> tuple[bool, bool, int]:
    """Return (all values are finite, any value is not zero, CRC-32).

    Bytes that two tensors share count for the first.
    """
    finite, crc, end = True, 0, _start(tensor) + tensor.nbytes
    any_value = file.at >= end
    for block in file.blocks(end):
        any_value = any_value or bool(block.any())
        finite = finite and is_finite(block, tensor.dtype)
        crc = crc32(block.data, crc)
    return finite, any_value, crc
