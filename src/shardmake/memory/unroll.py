"""The events of all layers of a model from those of a few.

A layer's events depend on its kind and on the kinds of its neighbours, because a layer frees what the next one read.
Traced is a short row of layers in which every such neighbourhood of the model appears. Their references move along: to
a layer's own allocations, to those of its neighbours, and to those outside the layers. That is right only if layers of
one neighbourhood are alike, which is checked on two of the most frequent.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Place = tuple[str, int]  # a segment: a pass, such as "forward 0" or "backward", and a layer; or "start" or "loss 0", 0
Reference = tuple[str, int, int]  # an allocation: its pass, its layer less that of the segment, its ordinal there
Segments = dict[Place, list[tuple[Any, ...]]]
Neighborhood = tuple[int | None, int, int | None]


def neighborhoods(kinds: Sequence[int]) -> list[Neighborhood]:
    """Return the kinds of each layer's predecessor, of itself, and of its successor."""
    return [*zip([None, *kinds[:-1]], kinds, [*kinds[1:], None], strict=True)]


def kept_layers(kinds: Sequence[int]) -> list[int] | None:
    """Return the layers to trace; None for all, if fewer do not have all neighborhoods, the most frequent one twice."""
    wanted = Counter(neighborhoods(kinds))
    frequent = max(wanted, key=wanted.__getitem__, default=None)
    kept = list(range(len(kinds)))
    length = len(kept) - 1
    while length:
        for start in range(len(kept) - length + 1):
            rest = kept[:start] + kept[start + length :]
            found = Counter(neighborhoods([kinds[layer] for layer in rest]))
            if wanted.keys() <= found.keys() and found[frequent] >= min(2, wanted[frequent]):  # type: ignore[index]
                kept = rest
                break
        else:
            length -= 1
        length = min(length, len(kept) - 1)
    return kept if len(kept) < len(kinds) else None


def unrolled(
    events: Sequence[Sequence[Any]], kept: Sequence[int], kinds: Sequence[int], prefix: str
) -> list[list[Any]] | None:
    """Return the ``events`` of the layers ``kept`` extended to all; weights' names begin with ``prefix`` and an index.

    The result is None if two layers of the most frequent neighborhood differ, or refer to layers further away than the
    next.
    """
    segments = _segments(events, len(kept) - 1, prefix)
    traced = neighborhoods([kinds[layer] for layer in kept])
    frequent, count = Counter(traced).most_common(1)[0]
    alike = [layer for layer, neighborhood in enumerate(traced) if neighborhood == frequent]
    if count > 1 and not _are_alike(alike[0], alike[1], segments):
        return None
    templates = [traced.index(neighborhood) for neighborhood in neighborhoods(kinds)]
    try:
        return _Unroller(segments, templates, prefix).run()
    except KeyError:  # a reference to what the layers there do not allocate
        return None


def _segments(events: Sequence[Sequence[Any]], last: int, prefix: str) -> Segments:
    """Return the events by place, in order, without the layer's own index and with a `Reference` for each number."""
    place: Place = ("start", 0)
    segments: Segments = {place: []}
    origins: dict[int, tuple[str, int, int]] = {}
    counts: Counter[Place] = Counter()
    forwards, ended = -1, False

    def reference(number: int) -> Reference:
        kind, layer, ordinal = origins[number]
        return kind, 0 if _is_outside(kind) else layer - place[1], ordinal

    for event in events:
        kind = event[0]
        if kind == "forward":
            forwards, ended = forwards + (event[1] == 0), False
            place = (f"forward {forwards}", event[1])
        elif kind == "backward block":
            place = ("backward", event[1])
        elif kind == "loss" or (kind == "alloc" and ended):
            place, ended = (f"loss {forwards}", 0), False
        segment = segments.setdefault(place, [])
        if kind == "alloc":
            origins[event[1]] = (*place, counts[place])
            counts[place] += 1
            segment.append((kind, event[2]))
        elif kind == "free":
            segment.append((kind, reference(event[1])))
        elif kind == "grad":
            name = event[2].replace(f"{prefix}{place[1]}.", f"{prefix}?.")
            segment.append((kind, None if event[1] is None else reference(event[1]), name))
        else:
            ended = ended or (kind == "forward end" and event[1] == last)
            segment.append((kind,))
    return segments


def _are_alike(one: int, other: int, segments: Segments) -> bool:
    for kind in {kind for kind, _ in segments if not _is_outside(kind)}:
        first, second = (  # what is outside is freed by one of the layers
            [event for event in segments.get((kind, layer), []) if event[0] != "free" or not _is_outside(event[1][0])]
            for layer in (one, other)
        )
        if first != second or any(event[0] == "free" and abs(event[1][1]) > 1 for event in first):
            return False
    return True


def _is_outside(kind: str) -> bool:
    return kind.startswith(("start", "loss"))


@dataclass
class _Unroller:
    """Writes the longer events, and numbers anew; ``templates`` has the traced layer of each layer."""

    segments: Segments
    templates: Sequence[int]
    prefix: str
    numbers: dict[tuple[str, int, int], int] = field(default_factory=dict)
    events: list[list[Any]] = field(default_factory=list)

    def run(self) -> list[list[Any]]:
        for kind in dict.fromkeys(kind for kind, _ in self.segments):
            layers = [(0, 0)] if _is_outside(kind) else list(enumerate(self.templates))
            for layer, template in reversed(layers) if kind == "backward" else layers:
                self._write(kind, template, layer)
        # All copies of a layer free what is outside of them; the last one does.
        last = {event[1]: place for place, event in enumerate(self.events) if event[0] == "free"}
        return [event for place, event in enumerate(self.events) if event[0] != "free" or last[event[1]] == place]

    def _write(self, kind: str, template: int, layer: int) -> None:
        count = 0
        for event in self.segments.get((kind, template), []):
            match event[0]:
                case "alloc":
                    number = self.numbers[kind, layer, count] = len(self.numbers)
                    count += 1
                    self.events.append(["alloc", number, event[1]])
                case "free":
                    self.events += [["free", number] for number in self._moved(event[1], kind, layer)]
                case "grad":
                    moved = self._moved(event[1], kind, layer)[0] if event[1] else None
                    self.events.append(["grad", moved, event[2].replace(f"{self.prefix}?.", f"{self.prefix}{layer}.")])
                case "forward" | "forward end" | "backward block":
                    self.events.append([event[0], layer])
                case _:
                    self.events.append(list(event))

    def _moved(self, reference: Reference, kind: str, layer: int) -> list[int]:
        """Return the new numbers for ``reference``; several if a place outside the layers frees it for all layers."""
        its_kind, offset, ordinal = reference
        if _is_outside(its_kind):
            places = [0]
        elif _is_outside(kind):
            places = [copy for copy, its in enumerate(self.templates) if its == offset]
        else:
            places = [layer + offset]
        return [self.numbers[its_kind, place, ordinal] for place in places]
