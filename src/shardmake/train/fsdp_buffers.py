"""Let accelerate load models whose saved state has buffers, such as the routers of DeepSeek-V3, under FSDP2."""

from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

_DONE = "_broadcasts_buffers"


def broadcast_saved_buffers(module: Any) -> None:
    """Change ``fsdp2_load_full_state_dict`` of ``module``, accelerate.utils.fsdp_utils, to broadcast buffers whole.

    FSDP2 shards parameters only. The function takes every entry of the state for a sharded one, and stops at a buffer
    with "'Tensor' object has no attribute 'device_mesh'" (accelerate 1.15).
    """
    load = module.fsdp2_load_full_state_dict
    if hasattr(load, _DONE):
        return

    @wraps(load)
    def load_with_buffers(accelerator: Any, model: torch.nn.Module, full_sd: dict[str, Any], **options: Any) -> Any:
        holders = _saved_buffers(model)
        for holder, name in holders.values():
            del holder._buffers[name]
        weights = {name: value for name, value in full_sd.items() if name not in holders}
        loaded = load(accelerator, model, weights, **options)
        for path, (holder, name) in holders.items():
            value = full_sd[path].detach()
            if dist.get_rank() > 0:  # without content, perhaps on the meta device
                value = torch.empty_like(value, device=accelerator.device)
            value = value.to(accelerator.device)
            dist.broadcast(value, src=0)
            holder._buffers[name] = value
        return loaded

    setattr(load_with_buffers, _DONE, True)
    module.fsdp2_load_full_state_dict = load_with_buffers


def _saved_buffers(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """Return the module and the name in it of each buffer that ``state_dict`` contains, by its path."""
    found = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = (module, name)
    return found
