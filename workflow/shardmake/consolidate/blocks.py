"""The memory that bytes pass through on their way from file to file."""

import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

Block = npt.NDArray[Any]

PAGE = mmap.PAGESIZE
"""Bytes; direct writes need offset, length and address in memory on its multiples."""


def page_aligned(size: int) -> Block:
    """``size`` bytes (uint8) that start on a page boundary."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


_AHEAD = 8 << 20
"""Bytes that the disk may read ahead, so that it does not wait for what is done with the bytes before."""


def read_into(block: Block, file: int, offset: int) -> int:
    """Fill ``block`` (uint8) from byte ``offset`` of ``file`` on; how many bytes there were."""
    os.posix_fadvise(file, offset + len(block), _AHEAD, os.POSIX_FADV_WILLNEED)
    return os.preadv(file, [block.data], offset)
