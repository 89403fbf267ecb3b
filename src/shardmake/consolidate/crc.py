"""CRC-32 of a whole from the CRC-32s of its parts, so that parts can be read in any order and by any worker.

A CRC is the remainder of the message's polynomial modulo P over GF(2). Appending n bytes multiplies by x^(8n), so
crc(A + B) = crc(A) * x^(8 * len(B)) + crc(B) (mod P); the powers by squaring, as zlib's crc32_combine does.
"""

from collections.abc import Iterable
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # of zip and zlib, bit-reversed: x^0 is the highest bit


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of all parts one after the other, each given as (its CRC-32, its length in bytes)."""
    whole = 0
    for crc, length in parts:
        whole = _multiply(_power(length), whole) ^ crc
    return whole


@lru_cache(maxsize=4096)
def _power(length: int) -> int:
    """x^(8 * length) modulo P."""
    result, square = 1 << 31, 1 << 23  # x^0 and x^8
    while length:
        if length & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        length >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials modulo P, bits reversed."""
    product = 0
    for power in range(31, -1, -1):
        if a >> power & 1:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
