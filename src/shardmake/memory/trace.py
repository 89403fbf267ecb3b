"""The events of a micro step from a fake-tensor trace, for architectures outside `families`.

A few layers are traced, and the events of a middle one are repeated. Their references move along: to the layer's own
allocations, to those of its neighbours, and to those outside the layers. That is right only if layers are alike, which
is checked.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import takewhile
from typing import Any

from shardmake.core.atomic import write_json
from shardmake.core.log import ROOT
from shardmake.memory.cache import cached_path, read_cached, run_helper
from shardmake.memory.ddp import StepEvents
from shardmake.memory.decoder import weight_bytes
from shardmake.memory.model import Model
from shardmake.memory.scenario import Scenario
from shardmake.memory.token_loops import SCALED

TRACER = "shardmake.memory.tracer"
KEPT = 4  # layers that are traced: the first, two that must be alike, the last
Place = tuple[str, int]  # a segment: "forward" or "backward" of a layer, or "start" and "loss" with 0
Origin = tuple[Place, int]  # the segment of an allocation and its ordinal there
TEMPLATE = 1


def trace_all(scenarios: Iterable[Scenario]) -> None:
    """Trace the steps that `scaled` needs for ``scenarios``, in one process, and cache them on disk."""
    _trace(_request(replace(scenario, micro_batch=size)) for scenario in scenarios for size in _sizes(scenario))


def _trace(requests: Iterable[dict[str, Any]]) -> None:
    """Trace the steps of ``requests`` that are not on disk."""
    by_path = {cached_path(TRACER, request): request for request in requests}
    missing = {path: request for path, request in by_path.items() if not path.is_file()}
    if missing:
        traces = run_helper(TRACER, {"requests": list(missing.values())}, _doing(next(iter(missing.values()))))
        for path, events in zip(missing, traces, strict=True):
            write_json(path, events)
    for request in list(by_path.values())[:1]:
        _report_scaled(read_cached(TRACER, request), request)


def _report_scaled(events: StepEvents, request: Mapping[str, Any]) -> None:
    """Log once that the trace is one of fewer tokens, which was scaled."""
    if events and events[0][0] == SCALED:
        _warn_of_scaling(request["config"]["model_type"], events[0][1], request["sequence_length"])


@cache
def _warn_of_scaling(model_type: str, traced: int, tokens: int) -> None:
    logging.getLogger(ROOT).warning(
        "The layers of %s loop over their tokens. A step of %d tokens was traced, and its bytes scaled to %s.",
        model_type, traced, f"{tokens:,}",
    )  # fmt: skip


def traced_tokens(scenario: Scenario) -> int | None:
    """Return with how many tokens the step of ``scenario`` was traced if its bytes were scaled; else None."""
    if scenario.model.decoder is not None:
        return None
    trace_all([scenario])
    events = read_cached(TRACER, _request(replace(scenario, micro_batch=_sizes(scenario)[0])))
    return events[0][1] if events and events[0][0] == SCALED else None


def _doing(request: Mapping[str, Any]) -> str:
    return (
        f"Running steps of {request['config']['model_type']} without memory, to find what they allocate. Layers that "
        f"loop over their {request['sequence_length']:,} tokens, or over chunks of them, can take minutes"
    )


def scaled(scenario: Scenario) -> StepEvents:
    """Return the events of one forward and backward pass of ``scenario``; every size is linear in the micro batch.

    A few layers are traced and repeated. A model whose layers differ is traced as a whole. A step whose events differ
    between micro batches 2 and 3 is traced at its own size.
    """
    trace_all([scenario])
    one, *more = (read_cached(TRACER, _request(replace(scenario, micro_batch=size))) for size in _sizes(scenario))
    events = one
    if more:
        (two,) = more
        if [event[0] for event in one] != [event[0] for event in two]:
            return _traced(scenario)
        beyond = scenario.micro_batch - 2
        events = [
            [*a[:2], a[2] + (b[2] - a[2]) * beyond] if a[0] == "alloc" else a for a, b in zip(one, two, strict=True)
        ]
    if _kept_layers(scenario.model) is None:
        return events
    return unrolled(events, len(scenario.model.blocks), _prefix(scenario.model)) or _traced(scenario)


def _kept_layers(model: Model) -> int | None:
    """Return how many layers to trace; None for all, if their weights differ or they are in several lists."""
    shapes: dict[int | None, list[tuple[str, tuple[int, ...]]]] = {}
    for tensor in model.tensors:
        name = tensor.name.replace(f"{_prefix(model)}{tensor.block}.", "")
        shapes.setdefault(tensor.block, []).append((name, tensor.shape))
    shapes.pop(None, None)
    alike = len({tuple(parts) for parts in shapes.values()}) == 1
    return KEPT if alike and len(shapes) > KEPT else None


def _prefix(model: Model) -> str:
    """Return the part of a weight's name before the layer's index."""
    one, two = (next((t.name for t in model.tensors if t.block == block), "") for block in (0, 1))
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


def _sizes(scenario: Scenario) -> tuple[int, ...]:
    """Return the micro batches to trace. A batch of one is separate: PyTorch skips copies if a dimension is 1."""
    return (1,) if scenario.micro_batch == 1 else (2, 3)


def _traced(scenario: Scenario) -> StepEvents:
    """Return the events of all layers, traced at the scenario's own size."""
    request = {**_request(scenario), "layers": None}
    _trace([request])
    events: StepEvents = read_cached(TRACER, request)
    return events


def _request(scenario: Scenario) -> dict[str, Any]:
    adapted = scenario.method_spec.has_adapters
    held = "fp32" if weight_bytes(scenario) == 4 and not adapted else scenario.precision
    return {
        "config": dict(scenario.model.config),
        "source": scenario.model.source,
        "layers": _kept_layers(scenario.model),
        "trust_remote_code": scenario.model.trust_remote_code,
        "micro_batch": scenario.micro_batch,
        "sequence_length": scenario.sequence_length,
        "attention": scenario.attention,
        "masked": scenario.masked,
        "checkpointing": scenario.checkpointing,
        "autocast": scenario.autocast,
        "precision": scenario.precision,
        "weights": scenario.adapter_compute if adapted else held,
        "frozen": held,
        "in_four_bits": scenario.method_spec.in_four_bits,
        "widened": "fp32" if adapted and weight_bytes(scenario) == 4 else held,
        "norms": "fp32" if scenario.widens_frozen and scenario.autocast else held,
        "method": scenario.method,
        "rank": scenario.lora_rank,
        "targets": scenario.lora_targets,
        "dropout": scenario.lora_dropout,
    }


def unrolled(events: StepEvents, layers: int, prefix: str) -> list[list[Any]] | None:
    """Return the events of `KEPT` layers extended to ``layers``; weights' names begin with ``prefix`` and an index.

    The result is None if the two middle layers differ, or refer to layers further away than the next.
    """
    segments, origins = _segments(events)
    if not _layers_alike(segments, origins, prefix):
        return None
    return _Unroller(segments, origins, layers, prefix).run()


def _segments(events: StepEvents) -> tuple[dict[Place, list[Sequence[Any]]], dict[int, Origin]]:
    """Return the events by place, in order, and the place in which each number was allocated."""
    place: Place = ("start", 0)
    segments: dict[Place, list[Sequence[Any]]] = {place: []}
    origins: dict[int, Origin] = {}
    counts: dict[Place, int] = {}
    for event in events:
        if event[0] in ("forward", "backward block"):
            place = (event[0].split()[0], event[1])
        elif event[0] == "loss" or (event[0] == "alloc" and place == ("forward", KEPT - 1) and _ended(segments[place])):
            place = ("loss", 0)
        segments.setdefault(place, []).append(event)
        if event[0] == "alloc":
            origins[event[1]] = (place, counts.get(place, 0))
            counts[place] = counts.get(place, 0) + 1
    return segments, origins


def _ended(segment: Sequence[Sequence[Any]]) -> bool:
    return any(event[0] == "forward end" for event in segment)


def _layers_alike(segments: dict[Place, list[Sequence[Any]]], origins: dict[int, Origin], prefix: str) -> bool:
    for kind in ("forward", "backward"):
        one, two = (
            list(_relative(segments.get((kind, layer), []), layer, origins, prefix))
            for layer in (TEMPLATE, TEMPLATE + 1)
        )
        if one != two or any(event[0] == "free" and abs(event[2]) > 1 for event in one):
            return False
    return True


def _relative(
    segment: Sequence[Sequence[Any]], layer: int, origins: dict[int, Origin], prefix: str
) -> Iterator[tuple[Any, ...]]:
    """Yield a layer's events without its own index and without numbers."""
    for event in segment:
        match event[0]:
            case "alloc":
                yield "alloc", event[2]
            case "free":
                yield "free", *_reference(origins[event[1]], layer)
            case "grad":
                reference = None if event[1] is None else _reference(origins[event[1]], layer)
                yield "grad", reference, event[2].replace(f"{prefix}{layer}.", f"{prefix}?.")
            case _:
                yield event[0], event[1] - layer


def _reference(origin: Origin, layer: int) -> tuple[str, int, int]:
    (kind, index), ordinal = origin
    return kind, index - layer if kind in ("forward", "backward") else 0, ordinal


class _Unroller:
    """Writes the longer events, and numbers anew."""

    def __init__(
        self, segments: dict[Place, list[Sequence[Any]]], origins: dict[int, Origin], layers: int, prefix: str
    ) -> None:
        self.segments = segments
        self.origins = origins
        self.layers = layers
        self.prefix = prefix
        self.numbers: dict[Origin, int] = {}
        self.events: list[list[Any]] = []

    def run(self) -> list[list[Any]]:
        self._write("start", 0, 0)
        for layer in range(self.layers):
            self._write("forward", self._kept(layer), layer)
        self._write("loss", 0, 0)
        for layer in reversed(range(self.layers)):
            self._write("backward", self._kept(layer), layer)
        return self.events

    def _kept(self, layer: int) -> int:
        """Return the traced layer that ``layer`` is a copy of."""
        from_end = self.layers - layer
        return KEPT - from_end if from_end < KEPT - TEMPLATE else min(layer, TEMPLATE)

    def _write(self, kind: str, kept: int, layer: int) -> None:
        count = 0
        for event in self.segments.get((kind, kept), []):
            match event[0]:
                case "alloc":
                    number = len(self.numbers)
                    self.numbers[(kind, layer), count] = number
                    count += 1
                    self.events.append(["alloc", number, event[2]])
                case "free":
                    self.events += [["free", number] for number in self._moved(event[1], kind, kept, layer)]
                case "grad":
                    name = event[2].replace(f"{self.prefix}{kept}.", f"{self.prefix}{layer}.")
                    numbers = [] if event[1] is None else self._moved(event[1], kind, kept, layer)
                    self.events.append(["grad", numbers[0] if numbers else None, name])
                case "forward" | "forward end" | "backward block":
                    self.events.append([event[0], layer])
                case _:
                    self.events.append(list(event))

    def _moved(self, number: int, kind: str, kept: int, layer: int) -> list[int]:
        """Return the new numbers for ``number``; several if a place outside the layers frees it for all layers."""
        (its_kind, its_layer), ordinal = self.origins[number]
        if its_kind in ("start", "loss"):
            places = [0]
        elif kind in ("start", "loss"):
            places = [copy for copy in range(self.layers) if self._kept(copy) == its_layer]
        else:
            places = [layer + its_layer - kept]
        return [self.numbers[(its_kind, place), ordinal] for place in places]
