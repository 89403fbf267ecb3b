"""Suggestions if nothing fits: the smallest change of each setting that would fit on its own."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from shardmake.core.errors import ShardmakeError
from shardmake.core.units import GIB
from shardmake.plan.candidates import describe_choice
from shardmake.plan.choose import choose_from
from shardmake.plan.planner import Planner
from shardmake.plan.resolve import ResolvedRun, check, resolve

MAX_NODE_FACTOR = 64
MIN_SEQUENCE_LENGTH = 128


class Suggestion(NamedTuple):
    """One setting with its new value and the result."""

    setting: str
    value: Any
    outcome: str


def changes(nodes: int, sequence_length: int, method: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield settings by name, each with the values to try, the smallest change first."""
    yield "nodes", [nodes << power for power in range(1, MAX_NODE_FACTOR.bit_length())]
    halves = (sequence_length >> power for power in range(1, sequence_length.bit_length()))
    yield "sequence_length", [length for length in halves if length >= MIN_SEQUENCE_LENGTH]
    if method == "full":
        yield "method", ["lora"]
        yield "method", ["qlora"]


def suggestions(kinds: Iterable[tuple[str, list[Any]]], outcome: Callable[[str, Any], str | None]) -> list[Suggestion]:
    """Return the first value of each setting that has an ``outcome``; None means that a value does not help."""
    found = []
    for setting, values in kinds:
        tried = ((value, outcome(setting, value)) for value in values)
        found += [Suggestion(setting, value, text) for value, text in tried if text][:1]
    return found


def suggest(settings: ResolvedRun) -> list[Suggestion]:
    """Return the changes of the configuration that would each make something fit.

    A model that has to be traced gets none, because tracing that many steps takes minutes.
    """
    run, cluster = settings.run, settings.cluster
    if settings.model.decoder is None:
        return []
    kinds = list(changes(run.nodes or cluster.max_nodes, run.sequence_length, run.method))
    if run.strategy != "auto":
        kinds.insert(0, ("strategy", ["auto"]))
    if settings.precision == "fp32" and not settings.hardware.is_cpu:
        kinds.insert(0, ("precision", ["auto"]))

    def outcome(setting: str, value: Any) -> str | None:
        changed = run.model_copy(update={setting: value})
        max_nodes = max(cluster.max_nodes, changed.nodes or 0)
        try:
            resolved = resolve(changed, cluster.model_copy(update={"max_nodes": max_nodes}))
            check(resolved)
            found, _ = choose_from(Planner(resolved))
        except ShardmakeError:  # nothing fits, or another setting excludes it: the batch, a package
            return None
        return f"{describe_choice(found.choice)}: {found.memory.gpu.device / GIB:.1f} GiB per GPU"

    return suggestions(kinds, outcome)
