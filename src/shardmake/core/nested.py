"""Nested dictionaries by dotted keys such as ``zero_optimization.stage``."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any


def paths(values: Mapping[Any, Any], before: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield each value that is not a section with content, and the keys that lead to it."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from paths(value, (*before, key))
        else:
            yield (*before, key), value


def leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every value of nested dictionaries with its dotted key; an empty section has none."""
    return ((".".join(map(str, path)), value) for path, value in paths(values) if not isinstance(value, Mapping))


def overlay(base: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``added``, whose keys are dotted."""
    merged: dict[str, Any] = deepcopy(dict(base))
    for key, value in added.items():
        place = merged
        *path, last = key.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return merged


def same(one: object, other: object) -> bool:
    """Return True for equal values; a boolean is not a number, a list equals a tuple."""
    if isinstance(one, bool) is not isinstance(other, bool):
        return False
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    return one == other
