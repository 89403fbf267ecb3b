"""The script of a micro step from the fake-tensor trace, for architectures without a closed form."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from shardmake.plan.memory.decoder import weight_bytes
from shardmake.plan.memory.scenario import Scenario
from shardmake.plan.memory.script import Script
from shardmake.plan.model import cached_path, read_cached, run_helper
from shardmake.receipt import write_json

TRACER = "shardmake.plan.memory.tracer"


def trace_all(scenarios: Iterable[Scenario]) -> None:
    """Trace what `scaled` needs for each of ``scenarios``, in one process, and keep it by config and versions."""
    wanted: dict[str, dict[str, Any]] = {}
    for scenario in scenarios:
        for size in _sizes(scenario):
            request = _request(replace(scenario, micro_batch=size))
            path = cached_path(TRACER, request)
            if not path.is_file():
                wanted[str(path)] = request
    if wanted:
        scripts = run_helper(TRACER, {"requests": list(wanted.values())})
        for request, script in zip(wanted.values(), scripts, strict=True):
            write_json(cached_path(TRACER, request), script)


def scaled(scenario: Scenario) -> Script:
    """Events of one forward and backward pass of ``scenario``: every size is linear in the micro batch.

    Steps whose events differ between micro batches 2 and 3 are traced at their own size.
    """
    trace_all([scenario])
    one, *more = (read_cached(TRACER, _request(replace(scenario, micro_batch=size))) for size in _sizes(scenario))
    if not more:
        return one
    if not _alike(one, more[0]):
        return _traced(scenario)
    return [_at_batch(scenario.micro_batch, *pair) for pair in zip(one, more[0], strict=True)]


def _sizes(scenario: Scenario) -> tuple[int, ...]:
    """A batch of one is a case of its own: PyTorch skips copies where a dimension is 1."""
    return (1,) if scenario.micro_batch == 1 else (2, 3)


def _traced(scenario: Scenario) -> Script:
    request = _request(scenario)
    path = cached_path(TRACER, request)
    if not path.is_file():
        write_json(path, run_helper(TRACER, {"requests": [request]})[0])
    script: Script = read_cached(TRACER, request)
    return script


def _alike(one: Script, two: Script) -> bool:
    return len(one) == len(two) and all(a[0] == b[0] for a, b in zip(one, two, strict=True))


def _at_batch(batch: int, one: Any, two: Any) -> Any:
    return [one[0], one[1], one[2] + (two[2] - one[2]) * (batch - 2)] if one[0] == "alloc" else one


def _request(scenario: Scenario) -> dict[str, Any]:
    adapted = scenario.method != "full"
    held = "fp32" if weight_bytes(scenario) == 4 else scenario.precision
    return {
        "config": dict(scenario.model.config),
        "source": scenario.model.source,
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
        "keeps_output": scenario.stack.keeps_output,
        "softmax_saves_input": scenario.stack.softmax_saves_input,
        "method": scenario.method,
        "rank": scenario.lora_rank,
        "targets": scenario.lora_targets,
        "dropout": scenario.lora_dropout,
    }
