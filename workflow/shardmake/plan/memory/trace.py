"""The script of a micro step from the fake-tensor trace, for architectures without a closed form."""

from dataclasses import replace

from shardmake.plan.memory.decoder import weight_bytes
from shardmake.plan.memory.scenario import Scenario
from shardmake.plan.memory.script import Script
from shardmake.plan.model import cached_helper

TRACER = "shardmake.plan.memory.tracer"


def traced(scenario: Scenario) -> Script:
    """Events of one forward and backward pass of ``scenario``; cached by config, settings and versions."""
    adapted = scenario.method != "full"
    held = "fp32" if weight_bytes(scenario) == 4 else scenario.precision
    script: Script = cached_helper(
        TRACER,
        {
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
            "weights": scenario.adapter_weights if adapted else held,
            "frozen": held,
            "keeps_output": scenario.stack.keeps_output,
            "softmax_saves_input": scenario.stack.softmax_saves_input,
            "method": scenario.method,
            "rank": scenario.lora_rank,
            "targets": scenario.lora_targets,
            "dropout": scenario.lora_dropout,
        },
    )
    return script


def at_batch(scenario: Scenario, script: Script, other: Script) -> Script:
    """The script for ``scenario`` from those of micro batches 1 and 2: every size is linear in the micro batch."""
    return [
        [one[0], one[1], one[2] + (two[2] - one[2]) * (scenario.micro_batch - 1)] if one[0] == "alloc" else one
        for one, two in zip(script, other, strict=True)
    ]


def scaled(scenario: Scenario) -> Script:
    """`traced`, with at most two traces for any micro batch; a trace of its own where the two do not match."""
    if scenario.micro_batch <= 2:
        return traced(scenario)
    one, two = (traced(replace(scenario, micro_batch=size)) for size in (1, 2))
    if len(one) == len(two) and all(a[0] == b[0] for a, b in zip(one, two, strict=True)):
        return at_batch(scenario, one, two)
    return traced(scenario)
