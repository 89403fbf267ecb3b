"""Attention ``varlen``: PyTorch's variable-length FlashAttention as an attention kernel of transformers.

`torch.nn.attention.varlen` is a part of torch. It takes the boundaries of packed examples, so a batch needs no dense
mask. The kernel runs on NVIDIA GPUs from Ampere on, in 16 bits, on heads of up to 256 numbers, without dropout.
"""

from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad

from shardmake.config.attention import head_limit
from shardmake.core.errors import ModelError

_NAMES_GROUPS = "enable_gqa" in signature(varlen_attn).parameters
"""The kernel must be given an argument for grouped heads. That of torch 2.11 takes them as they are."""
_NO_ARGUMENTS = ("softcap", "s_aux", "position_bias")
"""Arguments of transformers' attention functions that change the scores and that the kernel does not take."""


class KernelLimitError(ModelError):
    """A model asks for something that the kernel does not do; ``limit`` is the end of a sentence about its class."""

    def __init__(self, module: torch.nn.Module, limit: str) -> None:
        super().__init__(f"attention: varlen cannot be used: {type(module).__name__} {limit}. Use another kernel.")
        self.limit = limit


def register_varlen() -> None:
    """Let models take ``attn_implementation="varlen"``, with no function for masks: it would wait for the GPU."""
    from transformers import AttentionInterface

    AttentionInterface.register("varlen", varlen_attention)


def varlen_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    sliding_window: int | None = None, is_causal: bool | None = None, cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Return causal attention of [batch, heads, tokens, width] within each example, as [batch, tokens, heads, width].

    Without ``cu_seq_lens_q`` each row is one example. Its padding is on the right (`shardmake.data.dataset.Collator`),
    so no token of the example attends to it. Raises `KernelLimitError`.
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if limit := _limit(query, key, attention_mask, dropout, causal, others):
        raise KernelLimitError(module, limit)
    batch, _, length, width = query.shape
    if cu_seq_lens_q is None or max_length_q is None:
        max_length_q = length
        cu_seq_lens_q = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=query.device)
    dtype, value_width = _kernel_dtype(module, query, value), value.shape[-1]
    value = pad(value, (0, width - value_width)) if value_width < width else value
    q, k, v = (tensor.transpose(1, 2).reshape(batch * length, -1, width).to(dtype) for tensor in (query, key, value))
    grouped: dict[str, Any] = {"enable_gqa": True} if _NAMES_GROUPS and key.shape[1] != query.shape[1] else {}
    bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    out = varlen_attn(q, k, v, *bounds, scale=scaling, window_size=window, **grouped)
    assert isinstance(out, torch.Tensor)
    return out[..., :value_width].reshape(batch, length, -1, value_width), None


def _limit(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, dropout: float, causal: bool, others: Any
) -> str:
    """Return what the kernel does not do of what a model asks for; empty if it does all."""
    if changes := [name for name in _NO_ARGUMENTS if others.get(name) is not None]:
        return f"changes the attention scores ({changes[0]})"
    if dropout:
        return "has dropout in its attention"
    if mask is not None:
        return "makes an attention mask of its own"
    if not causal:
        return "has attention to later tokens"
    if key.shape[2] != query.shape[2]:
        return "attends to more keys than it has queries"
    return head_limit(query.shape[-1])


def _kernel_dtype(module: torch.nn.Module, query: torch.Tensor, value: torch.Tensor) -> torch.dtype:
    """Return the 16-bit data type to compute in: norms and rotary embeddings may leave queries and keys in fp32."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    narrow = [tensor.dtype for tensor in (query, value) if tensor.dtype != torch.float32]
    planned: torch.dtype | None = getattr(getattr(module, "config", None), "dtype", None)
    return narrow[0] if narrow else planned or query.dtype


def register_cpu_kernel() -> None:
    """Give the operator of `torch.nn.attention.varlen` a forward pass on the CPU, where torch has none.

    It is slow and only for comparisons: the plan tries models with it, and tests compare the kernels with it.
    """
    torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", plain_varlen)


def plain_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output, log-sum-exp [heads, tokens] and random state as the operator's documentation describes them."""
    left, right = (max_k if size < 0 else size for size in window_size or (-1, -1))
    groups = query.shape[1] // key.shape[1]
    outs, sums = [], []
    for start, end in pairwise(cu_seq_q.tolist()):
        q, k, v = (tensor[start:end].transpose(0, 1).float() for tensor in (query, key, value))
        k, v = (tensor.repeat_interleave(groups, dim=0) for tensor in (k, v))
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        hidden = (distance > left) | (distance < -right)
        scores = (q @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)).masked_fill(hidden, -torch.inf)
        sums.append(scores.logsumexp(-1))
        outs.append((scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype))
    return torch.cat(outs), torch.cat(sums, dim=1), torch.zeros(2, dtype=torch.uint64)
