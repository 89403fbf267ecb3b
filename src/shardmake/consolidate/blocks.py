"""The memory that bytes pass through on their way from file to file."""

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Block = npt.NDArray[Any]

PAGE = mmap.PAGESIZE
"""Bytes; direct writes need offset, length and address in memory on its multiples."""


def page_aligned(size: int) -> Block:
    """``size`` bytes (uint8) that start on a page boundary."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


_PROBES = 16


def is_cached(path: Path, offset: int, size: int) -> bool:
    """Whether most of ``size`` bytes from ``offset`` on are in the page cache; False if the file system cannot tell."""
    file = os.open(path, os.O_RDONLY)
    try:
        places = range(offset, offset + size, max(1, size // _PROBES))
        return sum(_is_there(file, place) for place in places) > len(places) // 2
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return False
    finally:
        os.close(file)


def _is_there(file: int, offset: int) -> bool:
    try:
        return os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


_AHEAD = 8 << 20
"""Bytes that the disk may read ahead, so that it does not wait for what is done with the bytes before."""


def read_into(block: Block, file: int, offset: int) -> int:
    """Fill ``block`` (uint8) from byte ``offset`` of ``file`` on; how many bytes there were."""
    os.posix_fadvise(file, offset + len(block), _AHEAD, os.POSIX_FADV_WILLNEED)
    return os.preadv(file, [block.data], offset)
