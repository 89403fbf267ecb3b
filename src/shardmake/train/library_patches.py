"""Changes to what libraries do: import less, keep fp32 products, broadcast buffers, share rows, name adapters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardmake.core.environment import hidden
from shardmake.core.private_names import private, private_module


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace the function ``name`` of a class or module by one that calls ``around`` with it and its arguments."""
    function = getattr(owner, name)

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    setattr(owner, name, wrapped)


def import_deepspeed() -> None:
    """Import DeepSpeed without what no training of Shardmake uses: MLflow for its tuner, and kernels of its Muon.

    DeepSpeed compiles those functions for every optimizer (0.19), which imports Inductor: a second on every rank.
    """
    plain = mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda other: other))
    with hidden("mlflow"), plain, suppress(ImportError):
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401


@contextmanager
def kept_matmul_precision() -> Iterator[None]:
    """Keep the precision of fp32 matrix products on GPUs while an Accelerator is created.

    For a compiled fp32 model, Accelerate 1.15 turns TF32 on through torch's older switch, also if transformers has just
    turned it off. It is turned off by the same switch, because torch refuses values of the two that differ.
    """
    products = torch.backends.cuda.matmul
    had_tf32 = products.fp32_precision == "tf32"
    yield
    if products.fp32_precision == "tf32" and not had_tf32:
        products.allow_tf32 = False


def broadcast_saved_buffers(module: Any) -> None:
    """Change ``fsdp2_load_full_state_dict`` of ``module``, accelerate.utils.fsdp_utils, to broadcast buffers whole.

    FSDP2 shards parameters only. The function takes every entry of the state for a sharded one, and stops at a buffer
    with "'Tensor' object has no attribute 'device_mesh'" (accelerate 1.15). A second call has no effect.
    """

    def load_with_buffers(
        load: Any, accelerator: Any, model: torch.nn.Module, full_sd: dict[str, Any], **options: Any
    ) -> Any:
        holders = _saved_buffers(model)
        for holder, name in holders.values():
            del private(holder).buffers[name]
        weights = {name: value for name, value in full_sd.items() if name not in holders}
        loaded = load(accelerator, model, weights, **options)
        for path, (holder, name) in holders.items():
            value = full_sd[path].detach()
            if dist.get_rank() > 0:  # without content, perhaps on the meta device
                value = torch.empty_like(value, device=accelerator.device)
            value = value.to(accelerator.device)
            dist.broadcast(value, src=0)
            private(holder).buffers[name] = value
        return loaded

    if not hasattr(module.fsdp2_load_full_state_dict, "__wrapped__"):
        wrap(module, "fsdp2_load_full_state_dict", load_with_buffers)


def _saved_buffers(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """Return the module and the name in it of each buffer that ``state_dict`` contains, by its path."""
    found = {}
    for path, module in model.named_modules():
        for name, buffer in private(module).buffers.items():
            if buffer is not None and name not in private(module).non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = (module, name)
    return found


def name_checkpointed_adapters(tuners_utils: Any) -> None:
    """Let PEFT find adapters in layers that Accelerate wraps for activation checkpointing.

    PEFT selects weights by the names of modules. Those have the wrapper's part, and the names of weights do not, so it
    would silently save and load an empty adapter. ``tuners_utils`` is PEFT's module of that name; a second call has no
    effect.
    """
    part = private(private_module("checkpoint_wrapper")).CHECKPOINT_PREFIX
    name = "get_tuner_state_dict_key_prefixes"
    if not hasattr(getattr(private(tuners_utils), name), "__wrapped__"):
        wrap(private(tuners_utils), name, lambda find, *a, **more: {one.replace(part, "") for one in find(*a, **more)})


def share_rows(accelerator: Any, group_size: int) -> None:
    """Let each ``group_size`` ranks that follow each other read the same rows from prepared data loaders.

    Accelerate's data loaders read this mesh, but Accelerate creates it only after them if DeepSpeed trains (accelerate
    1.15). Without it, each rank of a group would silently get different data. They know a group by the name "tp"
    whatever it shares. FSDP would shard over a mesh of Accelerate's own, so only the data loaders get this one.
    """
    if group_size > 1 and getattr(accelerator.state, "ds_device_mesh", None) is None:
        shape = (accelerator.num_processes // group_size, group_size)
        mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp_shard", "tp"))
        accelerator.state.ds_device_mesh = mesh
        private(accelerator).prepare_device_mesh = lambda: mesh
