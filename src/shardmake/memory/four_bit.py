"""Linear layers in 4 bits for a trace on fake tensors: bitsandbytes' ``Linear4bit`` and ``MatMul4Bit``.

A layer casts its input to the type of the computation, dequantizes its weight for each product, also in the backward
pass, saves no input, and returns its input's type.
"""

from typing import Any

import torch
from torch import nn

from shardmake.memory.model import HEADS, SCORE_HEAD


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        whole = torch.empty_like(weight)
        out = tensor.new_empty(*tensor.shape[:-1], weight.shape[0])
        del whole
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        whole = torch.empty_like(weight)
        grad = grads[0].new_empty(*grads[0].shape[:-1], weight.shape[1])
        del whole
        return grad, None


class FourBitLinear(nn.Linear):
    """A linear layer whose weight is dequantized for each use; the weight has the type of the computation."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the input's type."""
        out = _Product.apply(input.to(self.weight.dtype), self.weight)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.to(input.dtype)


def set_four_bit_layers(model: nn.Module) -> None:
    """Make all linear layers but the head 4-bit ones, as QLoRA quantizes them."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and not (name.endswith(HEADS) or name == SCORE_HEAD):
            module.__class__ = FourBitLinear


def holds_four_bits(module: nn.Module) -> bool:
    """Return True if the weight of ``module`` is in 4 bits."""
    return isinstance(module, FourBitLinear)
