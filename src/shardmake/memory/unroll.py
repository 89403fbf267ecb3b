"""The events of all layers of a model from those of a few.

A layer's events depend on its kind and on the kinds of its neighbours, because a layer frees what the next one read.
Traced is a short row of layers in which every such neighbourhood of the model appears. Their references move along: to
a layer's own allocations, to those of its neighbours, and to those outside the layers. That is right only if layers of
one neighbourhood are alike, which is checked on two of the most frequent.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Place = tuple[str, int]  # a segment: a pass, such as "forward 0" or "backward", and a layer; or "start" or "loss 0", 0
Origin = tuple[Place, int]  # the segment of an allocation and its ordinal there
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
    segments, origins = _segments(events, len(kept) - 1)
    traced = neighborhoods([kinds[layer] for layer in kept])
    frequent, count = Counter(traced).most_common(1)[0]
    alike = [layer for layer, neighborhood in enumerate(traced) if neighborhood == frequent]
    if count > 1 and not _are_alike(alike[0], alike[1], segments, origins, prefix):
        return None
    templates = [traced.index(neighborhood) for neighborhood in neighborhoods(kinds)]
    try:
        return _Unroller(segments, origins, templates, prefix).run()
    except KeyError:  # a reference to what the layers there do not allocate
        return None


def _segments(events: Sequence[Sequence[Any]], last: int) -> tuple[dict[Place, list[Sequence[Any]]], dict[int, Origin]]:
    """Return the events by place, in order, and the place in which each number was allocated."""
    place: Place = ("start", 0)
    segments: dict[Place, list[Sequence[Any]]] = {place: []}
    origins: dict[int, Origin] = {}
    counts: Counter[Place] = Counter()
    forwards, ended = -1, False
    for event in events:
        kind = event[0]
        if kind == "forward":
            forwards, ended = forwards + (event[1] == 0), False
            place = (f"forward {forwards}", event[1])
        elif kind == "backward block":
            place = ("backward", event[1])
        elif kind == "loss" or (kind == "alloc" and ended):
            place, ended = (f"loss {forwards}", 0), False
        segments.setdefault(place, []).append(event)
        if kind == "forward end" and event[1] == last:
            ended = True
        elif kind == "alloc":
            origins[event[1]] = (place, counts[place])
            counts[place] += 1
    return segments, origins


def _are_alike(
    one: int, other: int, segments: dict[Place, list[Sequence[Any]]], origins: dict[int, Origin], prefix: str
) -> bool:
    for kind in {kind for kind, _ in segments if not _is_outside(kind)}:
        first, second = (
            list(_relative(segments.get((kind, layer), []), layer, origins, prefix)) for layer in (one, other)
        )
        if first != second or any(event[0] == "free" and abs(event[2]) > 1 for event in first):
            return False
    return True


def _is_outside(kind: str) -> bool:
    return kind.startswith(("start", "loss"))


def _relative(
    segment: Iterable[Sequence[Any]], layer: int, origins: dict[int, Origin], prefix: str
) -> Iterator[tuple[Any, ...]]:
    """Yield a layer's events without its own index and without numbers."""
    for event in segment:
        match event[0]:
            case "alloc":
                yield "alloc", event[2]
            case "free" if not _is_outside(origins[event[1]][0][0]):  # what is outside is freed by one of the layers
                yield "free", *_reference(origins[event[1]], layer)
            case "free":
                pass
            case "grad":
                reference = None if event[1] is None else _reference(origins[event[1]], layer)
                yield "grad", reference, event[2].replace(f"{prefix}{layer}.", f"{prefix}?.")
            case _:
                yield event[0], event[1] - layer


def _reference(origin: Origin, layer: int) -> tuple[str, int, int]:
    (kind, index), ordinal = origin
    return kind, 0 if _is_outside(kind) else index - layer, ordinal


class _Unroller:
    """Writes the longer events, and numbers anew; ``templates`` has the traced layer of each layer."""

    def __init__(
        self,
        segments: dict[Place, list[Sequence[Any]]],
        origins: dict[int, Origin],
        templates: Sequence[int],
        prefix: str,
    ) -> None:
        self.segments = segments
        self.origins = origins
        self.templates = templates
        self.prefix = prefix
        self.numbers: dict[Origin, int] = {}
        self.events: list[list[Any]] = []

    def run(self) -> list[list[Any]]:
        order = dict.fromkeys(kind for kind, _ in self.segments)
        for kind in order:
            if _is_outside(kind):
                self._write(kind, 0, 0)
                continue
            layers = list(enumerate(self.templates))
            for layer, template in reversed(layers) if kind == "backward" else layers:
                self._write(kind, template, layer)
        return self._without_repeated_frees()

    def _without_repeated_frees(self) -> list[list[Any]]:
        """Return the events with the last free of each number; all copies of a layer free what is outside of them."""
        freed: set[int] = set()
        found = []
        for event in reversed(self.events):
            if event[0] != "free" or event[1] not in freed:
                found.append(event)
            if event[0] == "free":
                freed.add(event[1])
        return found[::-1]

    def _write(self, kind: str, template: int, layer: int) -> None:
        count = 0
        for event in self.segments.get((kind, template), []):
            match event[0]:
                case "alloc":
                    number = len(self.numbers)
                    self.numbers[(kind, layer), count] = number
                    count += 1
                    self.events.append(["alloc", number, event[2]])
                case "free":
                    self.events += [["free", number] for number in self._moved(event[1], kind, template, layer)]
                case "grad":
                    name = event[2].replace(f"{self.prefix}{template}.", f"{self.prefix}{layer}.")
                    numbers = [] if event[1] is None else self._moved(event[1], kind, template, layer)
                    self.events.append(["grad", numbers[0] if numbers else None, name])
                case "forward" | "forward end" | "backward block":
                    self.events.append([event[0], layer])
                case _:
                    self.events.append(list(event))

    def _moved(self, number: int, kind: str, template: int, layer: int) -> list[int]:
        """Return the new numbers for ``number``; several if a place outside the layers frees it for all layers."""
        (its_kind, its_layer), ordinal = self.origins[number]
        if _is_outside(its_kind):
            places = [0]
        elif _is_outside(kind):
            places = [copy for copy, its in enumerate(self.templates) if its == its_layer]
        else:
            places = [layer + its_layer - template]
        return [self.numbers[(its_kind, place), ordinal] for place in places]
