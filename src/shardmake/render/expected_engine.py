"""The engine that the ranks must find, from the table of strategies."""

from typing import Any

from shardmake.run.plan import Choice


def expected_engine(choice: Choice, fsdp_version: int) -> dict[str, Any]:
    """What the ranks compare with the engine that came up, and refuse to train otherwise."""
    engine = choice.spec
    values = {
        "engine": engine.library,
        "zero_stage": engine.zero_stage,
        "world_size": choice.world_size,
        "dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[choice.precision],
        "offload_optimizer": engine.offload_optimizer,
        "offload_param": engine.offload_param,
    }
    if engine.is_deepspeed:
        values["tensor_parallel"] = choice.tensor_parallel
    if engine.is_fsdp:
        values |= {
            "fsdp_version": fsdp_version,
            "reshard_after_forward": engine.reshard_after_forward,
            "replicas": choice.nodes if engine.hybrid else 1,
        }
    return values
