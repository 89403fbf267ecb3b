"""The engine that the ranks must find, from the table of strategies."""

from typing import Any

from shardmake.run.plan import Choice, spec_of


def expected_engine(choice: Choice, fsdp_version: int) -> dict[str, Any]:
    """What the ranks compare with the engine that came up, and refuse to train otherwise."""
    engine = spec_of(choice)
    values = {
        "engine": engine.name,
        "zero_stage": engine.zero_stage,
        "world_size": choice.world_size,
        "dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[choice.precision],
        "offload_optimizer": engine.offload_optimizer,
        "offload_param": engine.offload_param,
    }
    if engine.name == "deepspeed":
        values["tensor_parallel"] = choice.tensor_parallel
    if engine.name == "fsdp":
        values |= {
            "fsdp_version": fsdp_version,
            "reshard_after_forward": engine.reshard_after_forward,
            "replicas": choice.nodes if engine.hybrid else 1,
        }
    return values
