"""Save the trained factors of a LoRA adapter, gathered from all ranks."""

from typing import Any

import torch
from safetensors.torch import save_file


def save_factors(accelerator: Any, model: torch.nn.Module, path: str) -> None:
    """Gather the factors in ``model`` as Accelerate does."""
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        save_file({name: tensor.contiguous() for name, tensor in state.items() if ".lora_" in name}, path)
