"""The events of a micro step from a fake-tensor trace, for architectures outside `families`.

A trace is kept as a tape: its events, with the bytes of each allocation as a polynomial. They are linear in the micro
batch, for which two micro batches are traced, and of second degree in the tokens of a sequence, for which three lengths
are traced once a second length is asked for. If the events differ between sizes, each size has a tape of its own.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from os.path import commonprefix
from pathlib import Path
from typing import Any

from shardmake.core.log import ROOT
from shardmake.memory.cache import cached_path, run_helper
from shardmake.memory.ddp import StepEvents
from shardmake.memory.decoder import micro_step, weight_bytes
from shardmake.memory.model import Model
from shardmake.memory.scenario import Scenario
from shardmake.memory.stand_in import stand_in
from shardmake.memory.unroll import kept_layers, unrolled

TRACER = "shardmake.memory.tracer"
_SIZE = ("micro_batch", "sequence_length")
_FIELDS = (
    *_SIZE, "sequence_parallel", "attention", "masked", "checkpointing", "activation_offload", "autocast", "precision",
    "method", "extra_forwards",
)  # fmt: skip
"""Fields of a scenario that its step depends on."""
Tape = Mapping[str, Any]


def trace_all(scenarios: Iterable[Scenario]) -> None:
    """Trace the steps that `events_of` needs for ``scenarios``, and keep each on disk as soon as it is there."""
    _trace(_request(scenario) for scenario in scenarios)


def _trace(requests: Iterable[dict[str, Any]]) -> None:
    """Trace the steps of ``requests`` that are not on disk; of one step with several lengths, the longest."""
    wanted: dict[Path, list[dict[str, Any]]] = {}
    for request in requests:
        if _read(request) is None:
            wanted.setdefault(_paths(request)[0], []).append(request)
    steps = []
    for general, group in wanted.items():
        known = _parsed(str(general))["lengths"] if general.is_file() else None
        if known == []:
            steps += [{**request, "lengths": 0} for request in group]
        else:
            lengths = {*(known or ()), *(request["sequence_length"] for request in group)}
            steps.append({**group[0], "sequence_length": max(lengths), "lengths": 1 if len(lengths) == 1 else 3})
    if steps:
        asked = [step | dict(zip(("general", "exact"), map(str, _paths(step)), strict=True)) for step in steps]
        kind, length = steps[0]["config"]["model_type"], steps[0]["sequence_length"]
        run_helper(
            TRACER, {"requests": asked},
            f"Running steps of {kind} without memory, to find what they allocate. Layers that loop over their "
            f"{length:,} tokens, or over chunks of them, can take minutes",
        )  # fmt: skip
        _parsed.cache_clear()


def _paths(request: Mapping[str, Any]) -> tuple[Path, Path]:
    """Return the files of a tape for more sizes than that of ``request``, and of one for this size alone."""
    key = {name: value for name, value in request.items() if name not in (*_SIZE, "lengths")}
    size = {name: request[name] for name in _SIZE}
    return cached_path(TRACER, {**key, "several": request["micro_batch"] > 1}), cached_path(TRACER, {**key, **size})


def _read(request: Mapping[str, Any]) -> Tape | None:
    """Return the tape on disk from which the events of ``request`` follow."""
    general, exact = _paths(request)
    if general.is_file():
        tape: Tape = _parsed(str(general))
        lengths, length = tape["lengths"], request["sequence_length"]
        if length in lengths[-1:] or (len(lengths) > 1 and length < lengths[-1]):
            return tape
    return _parsed(str(exact)) if exact.is_file() else None


@lru_cache(maxsize=8)
def _parsed(path: str) -> Any:
    return json.loads(Path(path).read_text())


def traced_tokens(scenario: Scenario) -> int | None:
    """Return with how many tokens the step of ``scenario`` was traced if its bytes were scaled; else None."""
    if scenario.model.decoder is not None:
        return None
    tokens: int | None = _tape(_request(scenario))["scaled"]
    return tokens


def events_of(scenario: Scenario) -> StepEvents:
    """Return the events of one forward and backward pass of ``scenario``: simulated if its family is written down.

    Of another model a few layers are traced and repeated. One whose layers are not alike is traced as a whole.
    """
    if scenario.model.decoder is not None:
        return micro_step(scenario)
    request = _request(scenario)
    if failure(scenario):
        return stand_in(replace(scenario, model=scenario.held_model))
    events = _events(request)
    if request["layers"] is None:
        return events
    repeated = unrolled(events, request["layers"], scenario.model.kinds, _prefix(scenario.model))
    return repeated or _events({**request, "layers": None})


def failure(scenario: Scenario) -> str | None:
    """Return why the step of ``scenario`` could not be traced, and what to do; None if it was."""
    if scenario.model.decoder is not None:
        return None
    tape = _tape(_request(scenario))
    if not tape.get("failed"):
        return None
    others = " or ".join(f"--attention {kernel} (attention: {kernel} in a run)" for kernel in tape["works"])
    instead = f"With {others} it can be traced. " if others else "No other attention kernel helped. "
    text = (
        f"A training step of {scenario.model.architecture} could not be traced with attention {scenario.attention}: "
        f"{tape['failed']}. {instead}Its activations are estimated from the sizes of its weights: a margin of half the "
        "estimate is kept. It may train all the same; a short run shows it."
    )
    _warn(text)
    return text


@cache
def _warn(text: str) -> None:
    logging.getLogger(ROOT).warning("%s", text)


def _tape(request: dict[str, Any]) -> Tape:
    _trace([request])
    tape = _read(request)
    assert tape is not None
    if tape["scaled"]:
        _warn(
            f"The layers of {request['config']['model_type']} loop over their tokens. A step of {tape['scaled']} "
            f"tokens was traced, and its bytes scaled to {request['sequence_length']:,}."
        )
    return tape


def _events(request: dict[str, Any]) -> list[list[Any]]:
    tape = _tape(request)
    rows, length = request["micro_batch"], request["sequence_length"]
    size = cache(lambda sizes: size_at(sizes, tape["lengths"] or [length], rows, length))
    return [[*event[:2], size(tuple(event[2]))] if isinstance(event[-1], list) else event for event in tape["events"]]


def size_at(sizes: tuple[int, ...], lengths: list[int], rows: int, length: int) -> int:
    """Return the bytes of an allocation with ``rows`` sequences of ``length`` tokens.

    ``sizes`` are those of ``lengths``, for micro batches above 1 of two sequences, and then that of the last length and
    three sequences.
    """
    size = _through(sizes[: len(lengths)], lengths, length)
    if len(sizes) > len(lengths):
        two, three = sizes[-2:]
        fixed = (3 * two - 2 * three) / two  # the part that does not depend on the rows
        size *= fixed + rows * (1 - fixed) / 2
    return max(0, round(size))


def _through(values: tuple[int, ...], lengths: list[int], length: int) -> float:
    """Return the value at ``length`` of the parabola through ``values`` at ``lengths``."""
    if length == lengths[-1] or len({*values}) == 1:
        return values[-1]
    (y0, y1, y2), (x0, x1, x2) = values, lengths
    first = (y1 - y0) / (x1 - x0)
    second = ((y2 - y1) / (x2 - x1) - first) / (x2 - x0)
    return y0 + (length - x0) * (first + (length - x1) * second)


def _prefix(model: Model) -> str:
    """Return the part of a weight's name before the layer's index."""
    names = [next((t.name for t in model.tensors if t.block == block), "") for block in (0, 1)]
    return commonprefix(names)  # noqa: RUF071  # of characters: the index follows a dot


@cache
def _kept(model: Model) -> list[int] | None:
    return kept_layers(model.kinds) if model.kinds else None


def _request(scenario: Scenario) -> dict[str, Any]:
    adapted, targets = scenario.method_spec.has_adapters, scenario.lora_targets
    names_layers = not isinstance(targets, str) and any(one.isdigit() for name in targets for one in name.split("."))
    held = "fp32" if weight_bytes(scenario) == 4 and not adapted else scenario.precision
    return {
        "config": dict(scenario.held_model.config),
        "source": scenario.model.source,
        "layers": None if names_layers else _kept(scenario.model),
        "trust_remote_code": scenario.model.trust_remote_code,
        **{field: getattr(scenario, field) for field in _FIELDS},
        "weights": scenario.adapter_compute if adapted else held,
        "frozen": held,
        "in_four_bits": scenario.method_spec.in_four_bits,
        "widened": "fp32" if adapted and weight_bytes(scenario) == 4 else held,
        "norms": "fp32" if scenario.widens_frozen and scenario.autocast else held,
        "rank": scenario.lora_rank,
        "targets": targets,
        "dropout": scenario.lora_dropout,
        "rows": scenario.token_rows,
        "loss": "log_probs" if scenario.log_probs else scenario.loss,
    }
