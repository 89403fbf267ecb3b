"""Replacements for operators whose CPU versions save other tensors for the backward pass than the GPU's.

Attention (FlashAttention-2 or the memory-efficient kernel), dropout (a mask of one byte per element), the experts'
grouped product, autocast's fp32 list. They only create tensors of the right sizes; nothing is computed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardmake.memory import size_tensors

ORIGINALS = {name: getattr(nn.functional, name) for name in ("softmax", "log_softmax", "layer_norm", "cross_entropy")}
TORCH_SOFTMAX = torch.softmax


class _Flash(torch.autograd.Function):
    """FlashAttention-2: saves q, k, v, out and the fp32 log-sum-exp; its backward pass accumulates dq in fp32."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(batch, heads, length, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        query, key, value, out, _lse = ctx.saved_tensors
        batch, heads, length, width = query.shape
        padded = (length + 127) // 128 * 128
        grad_q = query.new_empty(batch, length, heads, width)
        row_sums = query.new_empty(batch, heads, padded, dtype=torch.float32)
        accumulator = query.new_empty(batch, padded, heads, width, dtype=torch.float32)
        grads = [_grouped_grad(tensor, heads) for tensor in (key, value)]
        del row_sums, accumulator, out
        return grad_q.transpose(1, 2), *grads


def _grouped_grad(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the gradient of keys or values: computed per query head, then summed over the group."""
    batch, groups, length, width = tensor.shape
    grad = tensor.new_empty(batch, length, heads, width)
    if groups != heads:
        grad = grad.view(batch, length, groups, heads // groups, width).sum(3)
    return grad.transpose(1, 2)


class _MemoryEfficient(torch.autograd.Function):
    """The memory-efficient kernel with an additive mask: saves q, k, v, mask, out and the fp32 log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1])
        sums = query.new_empty(batch, heads, (length + 31) // 32 * 32, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        query, key, value, *_rest = ctx.saved_tensors
        delta = query.new_empty(query.shape[:3], dtype=torch.float32)
        grads = [tensor.new_empty(tensor.transpose(1, 2).shape) for tensor in (query, key, value)]
        del delta
        return *(grad.transpose(1, 2) for grad in grads), None


def _autocast_attention(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast to autocast's type; attention kernels are on its 16-bit list."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return [tensor.to(dtype or tensor.dtype) for tensor in tensors]


def _fused_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> Any:
    return _Flash.apply(*_autocast_attention(query, key, value)), None


def _masked_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> Any:
    """Model transformers' SDPA with a mask: keys and values are repeated, each layer makes the mask additive."""
    from transformers.integrations.sdpa_attention import repeat_kv

    query, key, value = _autocast_attention(query, key, value)
    key, value = (repeat_kv(tensor, query.shape[1] // tensor.shape[1]) for tensor in (key, value))
    batch, _, length, _ = query.shape
    is_additive = attention_mask is not None and attention_mask.is_floating_point()
    mask = attention_mask if is_additive else query.new_zeros(batch, 1, length, key.shape[2])
    return _MemoryEfficient.apply(query, key, value, mask), None


class _Exchange(torch.autograd.Function):
    """Ulysses' exchange of tokens and heads: a contiguous copy, the all-to-all, a copy in the kernel's order."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        contiguous = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        exchanged = torch.empty_like(contiguous)
        del contiguous
        return torch.empty_like(exchanged)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def _shared_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> Any:
    """Model attention to shared sequences; a rank has as many numbers after the exchange as before."""
    parts = [_Exchange.apply(tensor) for tensor in _autocast_attention(query, key, value)]
    return _Exchange.apply(_Flash.apply(*parts)), None


def register_attention() -> None:
    """Register the replacements with transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    replacements = {"fused": _fused_attention, "shared": _shared_attention, "masked": _masked_attention}
    for kind, attention in replacements.items():
        AttentionInterface.register(f"shardmake_{kind}", attention)
        mask = _boolean_mask if kind == "masked" else lambda *_, **__: None
        AttentionMaskInterface.register(f"shardmake_{kind}", mask)


def _boolean_mask(batch_size: int, q_length: int, kv_length: int, *_: Any, **__: Any) -> torch.Tensor:
    """Return a mask like that of ``sdpa_mask``, which layers of one kind share; a model may index or change it."""
    return torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool)


# Losses that take hidden states and the head: the tensors are those of `shardmake.memory.size_tensors`.

_OF_HIDDEN = ("free", 0)
"""The event that ends the first tensor, the hidden states."""


class _HeadLoss(torch.autograd.Function):
    """Allocates and frees what ``events`` says: a list for the forward pass, and one for the backward pass.

    ``made`` are the numbers of the gradients of hidden states and head in the second; None for no gradient.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: torch.Tensor, events: Any, made: Any) -> torch.Tensor:
        ctx.live, ctx.events, ctx.made = {}, events[1], made
        ctx.like = dict(zip(made, ((t.shape, t.dtype) for t in (hidden, head)), strict=True))
        _play(events[0], ctx.live, ctx.like)
        if _OF_HIDDEN in events[1]:
            ctx.save_for_backward(hidden)
        return hidden.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        live, ctx.live = ctx.live, {}
        _play(ctx.events, live, ctx.like)
        return *(live.pop(number, None) for number in ctx.made), None, None


def _play(events: Any, live: dict[int, torch.Tensor], like: dict[int, Any]) -> None:
    for kind, number, *rest in filter(_OF_HIDDEN.__ne__, events):
        if kind == "alloc":
            shape, dtype = like.get(number, ((rest[0],), torch.uint8))
            live[number] = torch.empty(shape, dtype=dtype)
        elif kind == "free" and number not in like:
            live.pop(number)


def head_loss(hidden: torch.Tensor, head: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a scalar whose passes allocate what the loss ``kind`` of hidden states and the head's weight does."""
    tape = size_tensors.Tape()
    tape.autocast = torch.get_autocast_dtype("cpu").itemsize if torch.is_autocast_enabled("cpu") else None
    tape.recording = torch.is_grad_enabled()
    entry = size_tensors.root(size_tensors.SizeTensor(tape, hidden.numel(), hidden.element_size()))
    node = entry.node
    assert node is not None
    parameter = size_tensors.Parameter("head", tuple(head.shape), head.element_size(), head.requires_grad)
    loss = size_tensors.HEAD_LOSSES[kind](entry, parameter, head.shape[0])
    if not hidden.requires_grad:
        entry.node = None
    del entry
    tape.casts.clear()
    forward = tape.events[1:]  # the first is that of the hidden states
    tape.events.clear()
    if loss.node is not None:
        size_tensors.backward(tape, loss)
    del loss
    of_head = next((event[1] for event in tape.events if event[0] == "grad"), None)
    of_hidden = node.grad.storage.number if node.grad is not None else None
    backward = [event for event in tape.events if event[0] != "grad"]
    found: torch.Tensor = _HeadLoss.apply(hidden, head, (forward, backward), (of_hidden, of_head))
    return found


# Linear layers in 4 bits for a trace on fake tensors: bitsandbytes' ``Linear4bit`` and ``MatMul4Bit``.
#
# A layer casts its input to the type of the computation, dequantizes its weight for each product, also in the backward
# pass, saves no input, and returns its input's type.


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


class _DropoutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty_like(tensor, dtype=torch.bool))
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (_mask,) = ctx.saved_tensors  # for which a checkpointed layer runs again
        return torch.empty_like(grads[0])


def _gpu_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Model dropout on the GPU: an output and a mask of one byte per element."""
    return _DropoutFunction.apply(input) if training and p else input


class _GroupedProduct(torch.autograd.Function):
    """``grouped_mm`` of the experts: saves the weights, and the tokens if the weights are trained.

    torch's shape function takes bf16 alone.
    """

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.like = tokens.shape, tokens.dtype
        ctx.save_for_backward(weight, tokens if ctx.needs_input_grad[1] else None)
        return tokens.new_empty(tokens.shape[0], weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        weight, _tokens = ctx.saved_tensors
        shape, dtype = ctx.like
        needs_tokens, needs_weight = ctx.needs_input_grad
        to_tokens = weight.new_empty(shape, dtype=dtype) if needs_tokens else None
        return to_tokens, torch.empty_like(weight) if needs_weight else None


def _grouped_product(input: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
    return _GroupedProduct.apply(input, weight)


def _in_fp32(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``function`` as CUDA's autocast runs it, in fp32; the CPU's autocast does not cast its input."""

    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            args = tuple(a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
        return function(*args, **kwargs)

    return wrapped


def emulate_gpu_kernels() -> None:
    """Replace the functions whose CPU versions save other tensors.

    Function modes do not work here: they are off while the backward pass recomputes a checkpointed layer.
    """
    nn.functional.dropout = _gpu_dropout
    nn.functional.grouped_mm = _grouped_product  # type: ignore[assignment]
    for name, original in ORIGINALS.items():
        setattr(nn.functional, name, _in_fp32(original))
    torch.softmax = _in_fp32(TORCH_SOFTMAX)
