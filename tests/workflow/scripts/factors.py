"""Save the trained factors of a LoRA adapter, gathered from all ranks."""

from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import FullyShardedDataParallel


def save_factors(accelerator: Any, model: torch.nn.Module, path: str) -> None:
    """Gather the factors in ``model`` as Accelerate does; under FSDP1 without its offload, which ends a CPU's process."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            state = {
                name.replace("_fsdp_wrapped_module.", ""): weight.detach().clone()
                for name, weight in model.named_parameters()
            }
    else:
        state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        save_file({name: tensor.contiguous() for name, tensor in state.items() if ".lora_" in name}, path)
