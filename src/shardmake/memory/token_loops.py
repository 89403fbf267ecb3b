"""The events of a step whose layers loop over their tokens, from traces of a few tokens.

A state space model without its kernels runs several operators for each token, so a trace of thousands of tokens takes
many minutes. Such a step is traced with three small numbers of tokens, and the bytes of each allocation are scaled:
those of a loop by the number of tokens, because each iteration allocates them, and all others as the three lengths
show: constant, linear or quadratic.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

Event = Sequence[Any]
LENGTHS: Final = (37, 41, 43)
"""Tokens of the short traces: primes, so that sizes of different meaning differ."""
SCALED: Final = "scaled"
"""The first event of scaled ones, with the number of tokens that were traced."""
_LEAST = 4096


def most_allocations(tokens: int) -> int:
    """Return the allocations of one layer's forward pass above which it loops over its ``tokens``."""
    return max(_LEAST, 2 * tokens)


def scaled_to(tokens: int, traces: Sequence[Sequence[Event]]) -> list[list[Any]] | None:
    """Return the events of a step of ``tokens`` from its ``traces`` with `LENGTHS`; None if these do not match."""
    in_loop = [list(_in_loop(events, length)) for events, length in zip(traces, LENGTHS, strict=True)]
    sizes = [
        [event[2] for event, loops in zip(events, marks, strict=True) if event[0] == "alloc" and not loops]
        for events, marks in zip(traces, in_loop, strict=True)
    ]
    if len({len(one) for one in sizes}) > 1:
        return None
    others = zip(*sizes, strict=True)
    found: list[list[Any]] = [[SCALED, LENGTHS[-1]]]
    for event, loops in zip(traces[-1], in_loop[-1], strict=True):
        if event[0] != "alloc":
            found.append(list(event))
        elif loops:
            found.append([event[0], event[1], event[2] * tokens // LENGTHS[-1]])
        else:
            found.append([event[0], event[1], _size_at(tokens, *next(others))])
    return found


def _in_loop(events: Sequence[Event], length: int) -> Iterator[bool]:
    """Yield for each event if it is an allocation of a loop: its layer has as many of that size as tokens."""
    places = list(_places(events))
    counts = Counter((place, event[2]) for place, event in zip(places, events, strict=True) if event[0] == "alloc")
    for place, event in zip(places, events, strict=True):
        yield event[0] == "alloc" and counts[place, event[2]] >= length


def _places(events: Sequence[Event]) -> Iterator[tuple[Any, ...]]:
    """Yield the layer and pass of each event."""
    place: tuple[Any, ...] = ("start",)
    for event in events:
        if event[0] in ("forward", "forward end", "backward", "backward block", "loss"):
            place = tuple(event)
        yield place


def _size_at(tokens: int, one: int, two: int, three: int) -> int:
    """Return the bytes with ``tokens`` of an allocation whose bytes with `LENGTHS` are given."""
    a, b, c = LENGTHS
    if one == two == three:
        return one
    if (three - two) * (b - a) == (two - one) * (c - b):
        return one + (two - one) * (tokens - a) // (b - a)
    if one * c * c == three * a * a and two * c * c == three * b * b:
        return three * tokens * tokens // (c * c)
    return three * tokens // c
