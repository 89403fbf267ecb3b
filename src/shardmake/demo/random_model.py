"""Write models of any size with random weights, in seconds: for measurements, not for training something."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmake.core.environment import hidden

_BLOCK = 1 << 26
"""Random values that are drawn; larger models repeat them, each matrix from another place."""
_SCALE = 0.02


def write_description(base: Path, folder: Path, shape: Mapping[str, Any]) -> None:
    """Write tokenizer and configuration of the model in ``base`` to ``folder``, with the values of ``shape``.

    That is all a plan needs.
    """
    from transformers import AutoConfig

    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = AutoConfig.from_pretrained(folder)
    config.update({**shape, "head_dim": shape["hidden_size"] // shape["num_attention_heads"]})
    config.save_pretrained(folder)


def write_weights(folder: Path) -> None:
    """Write random weights in bf16 beside the configuration in ``folder``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    values, start = _random_values(max(weight.numel() for weight in model.parameters())), 0
    for weight in model.parameters():
        if weight.dim() == 1:  # of a norm
            torch.nn.init.ones_(weight)
            continue
        start = (start + weight.numel()) % _BLOCK
        weight.data.copy_(values[start : start + weight.numel()].view(weight.shape))
    model.tie_weights()
    with hidden("deepspeed"):
        model.save_pretrained(folder)


def _random_values(count: int) -> Any:
    """Return at least ``count`` + `_BLOCK` normal values in bf16."""
    import torch

    block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)).mul_(_SCALE).to(torch.bfloat16)
    return block.repeat(2 + count // _BLOCK)
