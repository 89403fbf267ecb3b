"""What to change where nothing fits: each setting alone, by as little as will do."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

MOST_TIMES_NODES = 64
SHORTEST = 128


class Suggestion(NamedTuple):
    """One setting with its new value, and what comes of it."""

    setting: str
    value: Any
    outcome: str


def changes(nodes: int, sequence_length: int, method: str) -> Iterator[tuple[str, list[Any]]]:
    """Settings by name, each with the values to try, the smallest change first."""
    yield "nodes", [nodes << power for power in range(1, MOST_TIMES_NODES.bit_length())]
    halves = (sequence_length >> power for power in range(1, sequence_length.bit_length()))
    yield "sequence_length", [length for length in halves if length >= SHORTEST]
    if method == "full":
        yield "method", ["lora"]
        yield "method", ["qlora"]


def suggestions(kinds: Iterable[tuple[str, list[Any]]], outcome: Callable[[str, Any], str | None]) -> list[Suggestion]:
    """For each setting the first value with an ``outcome``, which is None where a value does not help."""
    found = []
    for setting, values in kinds:
        tried = ((value, outcome(setting, value)) for value in values)
        found += [Suggestion(setting, value, text) for value, text in tried if text][:1]
    return found
