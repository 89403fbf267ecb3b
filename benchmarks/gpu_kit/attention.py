"""Errors of varlen and eager attention in a small model: ``python -m benchmarks.gpu_kit.attention CASE WORK``."""

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from shardmake.data.dataset import IGNORED, Collator
from shardmake.data.varlen import register_cpu_kernel, register_varlen
from shardmake.doctor.gpu_report import AttentionErrors
from shardmake.doctor.kernels import relative_error
from shardmake.run.turns import wait_for_turn

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
LENGTHS = (192, 1, 320, 64)
"""Tokens of the packed examples."""


def attention_errors(device: str) -> AttentionErrors:
    """Return the errors of loss and gradients of one packed sequence; the reference has each example alone."""
    register_varlen()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager").to(device, torch.bfloat16)
    examples = [torch.randint(1, CONFIG.vocab_size, (length,)) for length in LENGTHS]
    alone = [{"input_ids": ids[None], "labels": ids[None]} for ids in examples if len(ids) > 1]
    eager = _differentiate(model, alone, device)
    exact = _differentiate(model.float(), alone, device)
    model.to(torch.bfloat16).set_attn_implementation("varlen")
    varlen = _differentiate(model, [_pack(examples)], device)
    return AttentionErrors(varlen=_largest_error(varlen, exact), eager=_largest_error(eager, exact))


def _pack(examples: list[torch.Tensor]) -> dict[str, Any]:
    """Return the batch that training gives to the kernel: flat, with the boundaries of the examples."""
    ids = torch.cat(examples)
    positions = torch.cat([torch.arange(len(example)) for example in examples])
    item = {"input_ids": ids, "labels": ids.where(positions > 0, IGNORED), "position_ids": positions}
    return Collator(len(ids), pad_token_id=0, packing=True, flat=True)([item])


def _differentiate(model: Any, batches: list[dict[str, Any]], device: str) -> list[torch.Tensor]:
    """Return the loss, summed over tokens, and the gradients of all parameters as one vector."""
    total = torch.zeros((), device=device)
    for batch in batches:
        here = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
        total = total + model(**here).loss.float() * (here["labels"][:, 1:] != IGNORED).sum()
    gradients = torch.autograd.grad(total, list(model.parameters()))
    return [total.detach(), torch.cat([gradient.float().flatten() for gradient in gradients])]


def _largest_error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return max(relative_error(here, there) for here, there in zip(found, exact, strict=True))


def main(name: str) -> None:
    """Print the errors as the last line; on a CPU with reference kernels, because torch has none there."""
    wait_for_turn(name)
    if not torch.cuda.is_available():
        from tests.unit.data.test_varlen import plain_backward

        register_cpu_kernel()
        torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", plain_backward)
    errors = attention_errors("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps({"attention": errors.as_json()}))


if __name__ == "__main__":
    main(sys.argv[1])
