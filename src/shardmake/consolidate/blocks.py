"""Page-aligned memory for blocks of a file, reads into it, and its conversion to another type.

torch does not convert the blocks, because its import takes longer and more memory than merging a model of a few GB.
Chunks fit into the processor's cache and all arrays are reused, which makes the conversion faster than a disk.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmake.checkpoint.formats.dtypes import ITEM_SIZE

Block = npt.NDArray[Any]

PAGE = mmap.PAGESIZE
"""Bytes; direct writes need offset, length and memory address at multiples of it."""


def page_aligned(size: int) -> Block:
    """Return ``size`` bytes (uint8) that start at a page boundary."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


_PROBES = 16


def is_cached(path: Path, offset: int, size: int) -> bool:
    """Return True if most of ``size`` bytes from ``offset`` on are in the page cache.

    Return False if the file system does not support the check.
    """
    file, cached = os.open(path, os.O_RDONLY), 0
    probes = range(offset, offset + size, max(1, size // _PROBES))
    try:
        for probe in probes:
            with contextlib.suppress(BlockingIOError):
                cached += os.preadv(file, [bytearray(1)], probe, os.RWF_NOWAIT)
        return cached > len(probes) // 2
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return False
    finally:
        os.close(file)


_AHEAD = 8 << 20
"""Bytes of read-ahead, so that the disk does not wait while the previous bytes are processed."""


def read_into(block: Block, file: int, offset: int) -> int:
    """Fill ``block`` (uint8) from byte ``offset`` of ``file`` on; return the number of bytes read."""
    if offset % (_AHEAD // 2) < len(block):  # each call visits all pages ahead
        os.posix_fadvise(file, offset + len(block), _AHEAD, os.POSIX_FADV_WILLNEED)
    return os.preadv(file, [block.data], offset)


_VIEW = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_CHUNK = 1 << 18
"""Elements; with fewer, threads wait for each other between numpy calls longer than a call takes."""


class Converter:
    """Converts blocks of at most ``elements`` elements, rounding to nearest even as torch does.

    Threads do not share a converter, because it owns the result.
    """

    def __init__(self, elements: int) -> None:
        self._out = page_aligned(elements * 4)
        self._bits = np.empty(_CHUNK, np.uint32)
        self._wide = np.empty(_CHUNK, np.float32)

    def convert(self, block: Block, source: str, target: str, shift: int = 0) -> Block:
        """Convert the bytes ``block`` (uint8) of elements of type ``source`` to bytes of type ``target``.

        The result starts ``shift`` bytes behind a page boundary and is valid until the next call.
        """
        values = block.view(_VIEW[source])
        out = self._out[shift : shift + values.size * ITEM_SIZE[target]].view(_VIEW[target])
        for begin in range(0, values.size, _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            wide = self._widen(values[chunk], source)
            if target == "BF16":
                self._to_bf16(wide, out[chunk])
                continue
            with np.errstate(over="ignore"):  # overflow becomes infinity, which verification reports by tensor
                out[chunk] = wide
        return out.view(np.uint8)

    def change(self, block: Block, source: str, target: str, change: Callable[[Block], Block], shift: int = 0) -> Block:
        """Return ``change`` of the values in float32, converted."""
        changed = change(self.convert(block, source, "F32").view(np.float32))
        return self.convert(changed.view(np.uint8), "F32", target, shift)

    def _widen(self, values: Block, source: str) -> Block:
        if source == "F32":
            return values
        if source == "F16":
            self._wide[: values.size] = values
            return self._wide[: values.size]
        bits = self._wide[: values.size].view(np.uint32)
        bits[:] = values
        bits <<= 16
        return bits.view(np.float32)

    def _to_bf16(self, values: Block, out: Block) -> None:
        """Round the upper half of the bits to nearest even (IEEE 754); NaN becomes the quiet NaN."""
        bits, rounded = values.view(np.uint32), self._bits[: values.size]
        np.right_shift(bits, 16, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)
        np.add(rounded, 0x7FFF, out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, 16, out=rounded)
        out[:] = rounded
        nan = np.isnan(values)
        if nan.any():
            out[nan] = 0x7FC0
