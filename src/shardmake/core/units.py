"""Units of bytes, and sizes and counts as text."""

import re
from collections.abc import Sequence
from typing import Final

from shardmake.core.errors import ConfigError

MIB: Final = 1 << 20
GIB: Final = 1 << 30
GB: Final = 10**9


def unit_of(size: float) -> tuple[str, int]:
    """Return the largest unit of which ``size`` is at least one, and its bytes."""
    units = (("GiB", GIB), ("MiB", MIB), ("KiB", 1024))
    return next((unit for unit in units if size >= unit[1]), ("bytes", 1))


def format_bytes(size: int) -> str:
    """Return ``size`` in the largest unit of which it is at least one: GiB, MiB, KiB or bytes."""
    name, unit = unit_of(size)
    return f"{size / unit:.{1 if unit == GIB else 0}f} {name}"


def format_duration(seconds: float) -> str:
    """Return a duration as ``3 h 05 min``, ``4 min 10 s`` or ``12 s``; ``0 s`` if the clocks of two machines differ."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, left = divmod(minutes, 60)
    if hours:
        return f"{hours} h {left:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def format_number(value: float) -> str:
    """Return ``value`` in three digits, or as a whole number from 100 on: ``0.158``, ``12.8``, ``1,160``."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plural(count: int, noun: str) -> str:
    """Return ``count`` with ``noun`` in the right number: ``1 attempt``, ``2 attempts``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Return ``noun`` with its numbers: ``rank 3``, ``ranks 1, 3``."""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


_UNITS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": MIB, "GIB": GIB}


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``5GB``, ``500MB`` or ``2GiB``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", text.upper())
    if not match or match[2] not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(f"Cannot parse the size {text!r}. Write a number and a unit, such as 5GB, 500MB or 2GiB.")
    return int(float(match[1]) * _UNITS[match[2]])


def format_count(number: int) -> str:
    """Return ``number`` with a suffix, such as ``7.62 billion`` or ``150 thousand``."""
    for size, word in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return str(number)
