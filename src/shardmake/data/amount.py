"""The amount of training data before it is tokenized, estimated from some of its rows."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Final, NamedTuple

from shardmake.config.models import Run
from shardmake.run.length import Length

_PACKED: Final = 1000
"""Examples that are packed for the estimate."""


class Sampled(NamedTuple):
    """The encoded rows of one source: the number of ``rows``, and the ``lengths`` of their examples in tokens."""

    rows: int
    lengths: list[int]


def estimate_length(run: Run, counts: Sequence[int], sampled: Sequence[Sampled], ranks: int) -> Length | None:
    """Return the length of a training on sources of ``counts`` rows, of which ``sampled`` were encoded.

    Both begin with the sources of training examples. None if nothing would be left, and for raw data.
    """
    sources = run.data.sources
    if run.data.is_raw:
        return None
    examples = [
        min(_trained(count, run), source.limit or count) * len(part.lengths) / part.rows
        for source, count, part in zip(sources, counts, sampled, strict=False)
    ]
    used = [count * source.repeat for source, count in zip(sources, examples, strict=True)]
    weights = [source.weight for source in sources if source.weight is not None]
    if weights:  # drawn by weight until each source was read once
        total = max(count / weight for count, weight in zip(examples, weights, strict=True))
        used = [total * weight for weight in weights]
    if not sum(used) or not all(part.lengths for part in sampled[: len(sources)]):
        return None
    lengths = [
        length
        for part, count in zip(sampled, used, strict=False)
        for length in islice(cycle(part.lengths), max(1, round(count * min(1, _PACKED / sum(used)))))
    ]
    scale = sum(used) / len(lengths)
    sequences = count_packed(lengths, run.sequence_length) if run.packing else len(lengths)
    return Length(
        run,
        examples=round(sum(used)),
        tokens=round(scale * sum(lengths)),
        sequences=max(1, round(scale * sequences)),
        ranks=ranks,
        is_estimate=True,
    )


def _trained(count: int, run: Run) -> int:
    """Return the rows that are not held out for evaluation."""
    return count if run.data.eval is not None else count - max(1, round(count * run.data.eval_fraction))


def count_packed(lengths: Sequence[int], room: int) -> int:
    """Return the number of sequences of ``room`` tokens that hold examples of ``lengths``, packed by best fit."""
    rooms: list[int] = []
    count = 0
    for length in sorted(lengths, reverse=True):
        place = bisect_left(rooms, length)
        left = rooms.pop(place) if place < len(rooms) else room
        count += left == room
        insort(rooms, left - length)
    return count
