"""Check that the engine is what the plan said, and refuse to train otherwise.

Accelerate and Transformers drop DeepSpeed or FSDP without a word in several configurations (``use_cpu: true`` in the
launch file, FSDP on a device type they do not list); the run then trains plain DDP, saves, and exits 0.
"""

import os
import socket
from collections.abc import Mapping
from typing import Any

_DTYPE_OF_MODE = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}


class EngineMismatchError(RuntimeError):
    """The engine that came up is not the planned one."""


def describe_engine(trainer: Any) -> dict[str, Any]:
    """What is about to train, read off the wrapped model: engine, ZeRO stage, world size, compute dtype, offload."""
    model = trainer.model_wrapped
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    kind = type(model).__name__
    if kind == "DeepSpeedEngine":
        return {"engine": "deepspeed", "world_size": world_size, **_describe_deepspeed(model)}
    engine = "fsdp" if _is_fsdp(model) else "ddp" if kind == "DistributedDataParallel" else kind
    return {
        "engine": "ddp" if engine == kind and world_size == 1 else engine,
        "zero_stage": 0,
        "world_size": world_size,
        "dtype": _DTYPE_OF_MODE[trainer.accelerator.mixed_precision],
        "offload_optimizer": None,
        "offload_param": None,
    }


def _describe_deepspeed(engine: Any) -> dict[str, Any]:
    dtype = "bfloat16" if engine.bfloat16_enabled() else "float16" if engine.fp16_enabled() else "float32"
    config = engine.zero_offload_optimizer(), engine.zero_offload_param()
    optimizer, param = (None if part is None or part.device == "none" else str(part.device.value) for part in config)
    return {
        "zero_stage": engine.zero_optimization_stage(),
        "dtype": dtype,
        "offload_optimizer": optimizer,
        "offload_param": param,
    }


def _is_fsdp(model: Any) -> bool:
    """FSDP1 wraps the module; FSDP2 gives it a mixed-in class whose name starts with FSDP."""
    return any(cls.__name__ in ("FullyShardedDataParallel", "FSDPModule") for cls in type(model).__mro__)


def check_engine(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare `describe_engine` with the plan's ``expected``; raise `EngineMismatchError` naming every difference."""
    wrong = {key: (found.get(key), value) for key, value in expected.items() if found.get(key) != value}
    if wrong:
        lines = [f"  {key}: planned {planned!r}, found {actual!r}" for key, (actual, planned) in wrong.items()]
        raise EngineMismatchError("The engine is not the planned one; nothing was trained.\n" + "\n".join(lines))


def environment_report() -> dict[str, Any]:
    """Where this rank finds itself, as the launcher told it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {"host": socket.gethostname(), "pid": os.getpid(), **{name.lower(): os.environ.get(name) for name in names}}
