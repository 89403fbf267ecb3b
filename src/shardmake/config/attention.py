"""The attention kernels: names, order of speed, and what their hardware and models must have."""

from typing import Final, Literal

Attention = Literal["varlen", "flash", "sdpa", "eager"]
KERNELS: Final[tuple[Attention, ...]] = ("varlen", "flash", "sdpa", "eager")
"""The fastest first."""
FLASH_KERNELS: Final[tuple[Attention, ...]] = ("varlen", "flash")
"""FlashAttention: as a part of torch, and as a package. Its batches are flat, with the boundaries of examples."""
FLASH_CAPABILITY: Final = 8.0
"""Compute capability from which FlashAttention runs: Ampere."""
# torch 2.13, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp
_LARGEST_HEAD, _HEAD_MULTIPLE = 256, 8


def head_limit(width: int) -> str:
    """Return why varlen does not take heads of ``width`` numbers, as the end of a sentence; empty if it does."""
    if width <= _LARGEST_HEAD and width % _HEAD_MULTIPLE == 0:
        return ""
    return f"has heads of {width} numbers, and the kernel takes multiples of {_HEAD_MULTIPLE} up to {_LARGEST_HEAD}"
