"""Check that boxes divide a tensor: every element is in exactly one of them."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""Offsets and sizes by dimension."""
_MOST_PAIRS = 4096
"""Boxes that are compared with each other if they do not form a grid."""


def covers(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Return True if ``boxes`` lie in a tensor of ``shape``, share no element, and leave none out."""
    inside = all(
        offset + size <= whole
        for offsets, sizes in boxes
        for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    )
    filled = [(offsets, sizes) for offsets, sizes in boxes if all(sizes)]
    held = sum(_elements(sizes) for _, sizes in filled)
    return inside and held == _elements(shape) and not _overlap(filled, 0)


def _elements(sizes: Iterable[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _overlap(boxes: Sequence[Box], dimension: int) -> bool:
    """Return True if two of the boxes share an element, given that they share the dimensions before ``dimension``."""
    if len(boxes) < 2:
        return False
    if dimension == len(boxes[0][0]):
        return True
    groups: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        groups.setdefault((box[0][dimension], box[1][dimension]), []).append(box)
    intervals = sorted(groups)
    is_grid = all(begin + size <= following for (begin, size), (following, _) in pairwise(intervals))
    if is_grid:
        return any(_overlap(group, dimension + 1) for group in groups.values())
    return len(boxes) > _MOST_PAIRS or any(
        _share(first, second) for index, first in enumerate(boxes) for second in boxes[:index]
    )


def _share(first: Box, second: Box) -> bool:
    return all(
        begin < other + length and other < begin + size
        for begin, size, other, length in zip(first[0], first[1], second[0], second[1], strict=True)
    )
