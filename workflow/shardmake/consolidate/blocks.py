"""The memory that bytes pass through on their way from file to file."""

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

Block = npt.NDArray[Any]

PAGE = mmap.PAGESIZE
"""Bytes; direct writes need offset, length and address in memory on its multiples."""


def page_aligned(size: int) -> Block:
    """``size`` bytes (uint8) that start on a page boundary."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)
