"""Page-aligned memory for blocks of a file, and reads into it."""

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

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
    file = os.open(path, os.O_RDONLY)
    try:
        probes = range(offset, offset + size, max(1, size // _PROBES))
        return sum(_is_byte_cached(file, probe) for probe in probes) > len(probes) // 2
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return False
    finally:
        os.close(file)


def _is_byte_cached(file: int, offset: int) -> bool:
    try:
        return os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


_AHEAD = 8 << 20
"""Bytes of read-ahead, so that the disk does not wait while the previous bytes are processed."""


def read_into(block: Block, file: int, offset: int) -> int:
    """Fill ``block`` (uint8) from byte ``offset`` of ``file`` on; return the number of bytes read."""
    os.posix_fadvise(file, offset + len(block), _AHEAD, os.POSIX_FADV_WILLNEED)
    return os.preadv(file, [block.data], offset)
