"""The events of a step whose layers loop over their tokens, from traces of a few tokens.

A state space model without its kernels runs several operators for each token, so a trace of hundreds of tokens takes
minutes. Such a step is traced with three small numbers of tokens, and the bytes of each allocation are scaled:
those of a loop by the number of tokens, because each iteration allocates them, and all others as the three lengths
show: constant, linear or quadratic.

The sum of a loop can differ by a token in `LENGTHS[-1]`, because some tensors are held for all tokens but one. With 19,
23 and 29 tokens, the peaks of small Mamba, RWKV, RecurrentGemma and Jamba models differed by -0.5 to +0.7 % from those
of whole steps of 48 and 64 tokens. With 17, 19 and 23 it was up to 1.1 %.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

Event = Sequence[Any]
LENGTHS: Final = (19, 23, 29)
"""Tokens of the short traces: primes, so that sizes of different meaning differ."""
MOST_ALIKE: Final = 128
"""Allocations of one size in a layer's forward pass above which a loop over the tokens is likely.

Shorter loops cost less to trace whole than with `LENGTHS`; a wrong guess costs three short traces.
"""


def found_in(traces: Sequence[Sequence[Event]]) -> bool:
    """Return if a layer's operator has more allocations the more tokens there are, in ``traces`` with `LENGTHS`."""
    return any(map(any, _in_loops([list(_sizes(events)) for events in traces])))


def scaled_to(tokens: int, traces: Sequence[Sequence[Event]]) -> list[list[Any]] | None:
    """Return the events of a step of ``tokens`` from its ``traces`` with `LENGTHS`.

    An allocation of ``traces`` ends with its operator. None if the traces do not match each other.
    """
    keys = [list(_sizes(events)) for events in traces]
    in_loop = _in_loops(keys)
    sizes = [
        [event[2] for event, loops in zip(events, marks, strict=True) if event[0] == "alloc" and not loops]
        for events, marks in zip(traces, in_loop, strict=True)
    ]
    if len({len(one) for one in sizes}) > 1:
        return None
    others = zip(*sizes, strict=True)
    found: list[list[Any]] = []
    for event, key, loops in zip(traces[-1], keys[-1], in_loop[-1], strict=True):
        if key is None:
            found.append(list(event))
        elif loops:
            found.append([*event[:2], key[1] * tokens // LENGTHS[-1]])
        else:
            found.append([*event[:2], _size_at(tokens, *next(others))])
    return found


def _in_loops(keys: Sequence[Sequence[tuple[Any, ...] | None]]) -> list[list[bool]]:
    """Return for each event of each trace if it is an allocation of a loop over the tokens.

    An operator of its layer then has more allocations of its size than half the tokens, and another number of them in
    each trace. The first or last token often takes another operator than those between, so the number is not exact.
    Weights of one shape, such as those of many experts, are as many in every trace.
    """
    counts = [Counter(filter(None, one)) for one in keys]
    fixed = set.intersection(*({(place, count) for (place, _), count in one.items()} for one in counts))
    return [
        [key is not None and 2 * count[key] > length and (key[0], count[key]) not in fixed for key in one]
        for one, count, length in zip(keys, counts, LENGTHS, strict=True)
    ]


def _sizes(events: Sequence[Event]) -> Iterator[tuple[tuple[Any, ...], int] | None]:
    """Yield of each allocation its layer, pass and operator, and its bytes; None for other events."""
    for place, event in zip(_places(events), events, strict=True):
        yield ((*place, event[3]), event[2]) if event[0] == "alloc" else None


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
