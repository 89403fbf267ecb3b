"""Checksums of the output, made while it is copied: the read-back is compared with them."""

import threading
from collections.abc import Mapping
from functools import lru_cache

from isal.isal_zlib import crc32, crc32_combine

from shardmake.consolidate.blocks import Block
from shardmake.consolidate.layout import PlannedTensor


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
