"""Check that the engine is the planned one, and refuse to train otherwise.

In several configurations Accelerate and transformers silently fall back to DDP (``accelerate launch --cpu``, FSDP on a
device type that they do not list). The run would then train, save and exit with 0.
"""

import os
import socket
from collections.abc import Mapping
from typing import Any

import torch

from shardmake.config.choices import TORCH_DTYPES
from shardmake.config.strategies import DDP, DEEPSPEED, FSDP
from shardmake.core.errors import EngineMismatchError
from shardmake.core.private_names import private
from shardmake.run.engine import Engine

_DTYPES: dict[str, str] = {"no": "float32", **{str(name): dtype for name, dtype in TORCH_DTYPES.items()}}
"""Torch's data type of each of Accelerate's precisions."""


def describe_engine(model: Any, precision: str) -> Engine:
    """Return the engine of the wrapped model, which may be compiled.

    ``precision`` is Accelerate's name of the compute data type, used if the engine has none of its own.
    """
    model = below_compiler(model)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    class_name = type(model).__name__
    if is_deepspeed_engine(model):
        return Engine(
            engine=DEEPSPEED,
            world_size=world_size,
            zero_stage=model.zero_optimization_stage(),
            dtype=compute_dtype(model, "no"),
            gradient_dtype=dtype_name(model.get_data_types()[1]),
            offload_optimizer=_device(model.zero_offload_optimizer()),
            offload_param=_device(model.zero_offload_param()),
            tensor_parallel=max(1, model.autotp_size()),
        )
    library = DDP if class_name == "DistributedDataParallel" or world_size == 1 else class_name
    described: dict[str, Any] = {}
    if class_name.startswith("FSDP"):
        library, described = FSDP, _describe_fsdp2(model)
    return Engine(
        engine=library, zero_stage=0, world_size=world_size, dtype=compute_dtype(model, precision), **described
    )


def below_compiler(model: Any) -> Any:
    """Return the wrapped model that `torch.compile` compiled as a whole; ``model`` itself if it is not compiled.

    Accelerate compiles a model around DDP. FSDP2 turns a compiled model that it shards into an
    ``FSDPOptimizedModule``, which has the state of FSDP. Layers that are compiled in place have no wrapper.
    """
    return private(model).orig_mod if type(model) is private(torch).dynamo.OptimizedModule else model


def is_deepspeed_engine(model: Any) -> bool:
    """Return True if DeepSpeed trains the wrapped model."""
    return type(model).__name__ == "DeepSpeedEngine"


def compute_dtype(model: Any, precision: str) -> str:
    """Return the compute data type by torch's name; ``precision`` is Accelerate's name of it without DeepSpeed."""
    if not is_deepspeed_engine(model):
        return _DTYPES[precision]
    return "bfloat16" if model.bfloat16_enabled() else "float16" if model.fp16_enabled() else "float32"


def dtype_name(dtype: Any) -> str:
    """Return torch's name of a data type."""
    return str(dtype).removeprefix("torch.")


def _device(offload: Any) -> str | None:
    """Return ``cpu``, ``nvme`` or None; DeepSpeed keeps the device as its enum or as the enum's value."""
    name = "none" if offload is None else str(getattr(offload.device, "value", offload.device))
    return None if name == "none" else name


def _describe_fsdp2(model: Any) -> dict[str, Any]:
    """Describe a model under FSDP2, which turns every wrapped module into a class ``FSDP...`` with its own state.

    The modules around the blocks never free their weights after forward. If any module does, the blocks were wrapped
    and the strategy reshards after forward. The root decides at the first forward pass, so it is asked only if no other
    module is wrapped.
    """
    sharded = [one for one in map(private, model.modules()) if hasattr(one, "get_fsdp_state")]
    states = [private(one.get_fsdp_state()) for one in sharded]
    groups = [group for state in states for group in parameter_groups(state)]
    inner = [group for state in states[1:] for group in parameter_groups(state)]
    policy = states[0].mp_policy
    offload = "cpu" if any(type(group.offload_policy).__name__ == "CPUOffloadPolicy" for group in groups) else None
    return {
        "fsdp_version": 2,
        "gradient_dtype": dtype_name(policy.reduce_dtype or policy.param_dtype or "float32"),
        "reshard_after_forward": any(group.post_forward_mesh_info is not None for group in inner or groups),
        "replicas": max(getattr(group.mesh_info, "replicate_mesh_size", 1) for group in groups),
        "expert_parallel": next((ranks for weight in model.parameters() if (ranks := _expert_ranks(weight))), None),
        "offload_optimizer": offload,
        "offload_param": offload,
    }


def _expert_ranks(weight: Any) -> int | None:
    """Return over how many ranks the experts of this fused ``weight`` are spread; None for another weight."""
    mesh: Any = getattr(weight, "device_mesh", None)
    names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
    ranks: int | None = mesh.size(names.index("ep")) if "ep" in names else None
    return ranks


def parameter_groups(state: Any) -> list[Any]:
    """Return the groups of parameters of FSDP's private ``state``; torch 2.11 has one or none."""
    if hasattr(state, "fsdp_param_groups"):
        return list(state.fsdp_param_groups)
    return [group for group in [state.fsdp_param_group] if group is not None]


def check_engine(found: Engine, expected: Engine) -> None:
    """Raise `EngineMismatchError` with every difference between ``found`` and the plan's ``expected``."""
    refuse_differences("The engine is not the planned one.", expected.differences(found))


def refuse_differences(problem: str, differing: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise `EngineMismatchError` with the planned and the found value of each name in ``differing``, if any."""
    if differing:
        lines = [f"  {name}: planned {planned!r}, found {found!r}" for name, (planned, found) in differing.items()]
        raise EngineMismatchError("\n".join([f"{problem} Nothing was trained.", *lines]))


def environment_report() -> dict[str, Any]:
    """Return this rank's host, process id and the launcher's variables."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {"host": socket.gethostname(), "pid": os.getpid(), **{name.lower(): os.environ.get(name) for name in names}}
