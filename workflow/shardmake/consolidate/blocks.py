"""The memory that bytes pass through on their way from file to file."""

import errno
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
"""Bytes that the disk may read ahead, so that it does not wait for what is done with the bytes before: a quarter of the
time of a cold merge, measured."""


class Reader:
    """Reads of bytes that nobody will want again: what was not in the page cache is, if possible, not put there.

    Where memory is full, to make room in the cache takes longer than the disk.
    """

    def __init__(self) -> None:
        self._flags = 0x80  # RWF_DONTCACHE, see preadv2(2); Linux has it since 6.14, for some file systems

    def read(self, file: int, into: Block, offset: int) -> int:
        """Fill ``into`` (uint8) from byte ``offset`` on; how many bytes there were."""
        os.posix_fadvise(file, offset + len(into), _AHEAD, os.POSIX_FADV_WILLNEED)
        try:
            return os.preadv(file, [into.data], offset, self._flags)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL) or not self._flags:
                raise
            self._flags = 0
            return os.preadv(file, [into.data], offset)
