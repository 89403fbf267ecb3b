"""The events of a micro step from a fake-tensor trace, for architectures outside `families`."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile
from typing import Any

from shardmake.core.atomic import write_json
from shardmake.memory.cache import cached_path, read_cached, run_helper
from shardmake.memory.decoder import weight_bytes
from shardmake.memory.events import StepEvents
from shardmake.memory.model import Model
from shardmake.memory.scenario import Scenario
from shardmake.memory.unroll import KEPT, unrolled

TRACER = "shardmake.memory.tracer"


def trace_all(scenarios: Iterable[Scenario]) -> None:
    """Trace the steps that `scaled` needs for ``scenarios``, in one process, and cache them on disk."""
    _trace(_request(replace(scenario, micro_batch=size)) for scenario in scenarios for size in _sizes(scenario))


def _trace(requests: Iterable[dict[str, Any]]) -> None:
    """Trace the steps of ``requests`` that are not on disk."""
    by_path = {cached_path(TRACER, request): request for request in requests}
    missing = {path: request for path, request in by_path.items() if not path.is_file()}
    if missing:
        traces = run_helper(TRACER, {"requests": list(missing.values())})
        for path, events in zip(missing, traces, strict=True):
            write_json(path, events)


def scaled(scenario: Scenario) -> StepEvents:
    """Return the events of one forward and backward pass of ``scenario``; every size is linear in the micro batch.

    A few layers are traced and repeated. A model whose layers differ is traced as a whole. A step whose events differ
    between micro batches 2 and 3 is traced at its own size.
    """
    trace_all([scenario])
    one, *more = (read_cached(TRACER, _request(replace(scenario, micro_batch=size))) for size in _sizes(scenario))
    if more and not _same_events(one, more[0]):
        return _traced(scenario)
    events = [_at_batch(scenario.micro_batch, *pair) for pair in zip(one, more[0], strict=True)] if more else one
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


def _same_events(one: StepEvents, two: StepEvents) -> bool:
    return len(one) == len(two) and all(a[0] == b[0] for a, b in zip(one, two, strict=True))


def _at_batch(batch: int, one: Any, two: Any) -> Any:
    return [one[0], one[1], one[2] + (two[2] - one[2]) * (batch - 2)] if one[0] == "alloc" else one


def _request(scenario: Scenario) -> dict[str, Any]:
    adapted = scenario.method != "full"
    held = "fp32" if weight_bytes(scenario) == 4 else scenario.precision
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
        "keeps_output": scenario.behavior.keeps_output,
        "softmax_saves_input": scenario.behavior.softmax_saves_input,
        "method": scenario.method,
        "rank": scenario.lora_rank,
        "targets": scenario.lora_targets,
        "dropout": scenario.lora_dropout,
    }
