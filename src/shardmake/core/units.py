"""Units of bytes, and sizes as text."""

from typing import Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30
GB: Final = 10**9


def format_bytes(size: int) -> str:
    """Return ``size`` in GiB, or in MiB if it is less than one GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
