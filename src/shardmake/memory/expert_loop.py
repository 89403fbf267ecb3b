"""Experts of a mixture that run one after the other, as in transformers before 5.0.

There, each expert is a module of its own with separate linear layers, and takes the tokens that chose it
(``MixtralSparseMoeBlock`` of transformers 4.45). The installed models hold all experts in one weight, so each expert
uses its part of it. How many tokens choose an expert depends on values, which a trace does not have: every expert gets
the same number. The temporaries of a backward pass are those of one expert.
"""

from typing import Any

import torch
from torch.nn.functional import linear

NAME = "shardmake_loop"


class _Rows(torch.autograd.Function):
    """Some rows of an expert's matrix. The first expert in the backward pass allocates the gradient of all experts."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, expert: int, start: int, end: int, transposed: bool) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.allocates = expert == weight.shape[0] - 1 and start == 0
        matrix = weight[expert].T if transposed else weight[expert]
        return matrix[start:end]

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return torch.empty_like(weight) if ctx.allocates else None, None, None, None, None


def register_expert_loop() -> None:
    """Register the loop with transformers as `NAME`."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, _run_experts)


def _run_experts(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of the experts of each token; ``hidden_states`` are tokens x hidden size."""
    tokens = -(-top_k_index.numel() // experts.num_experts)
    result = torch.zeros_like(hidden_states)
    weights = top_k_weights.to(hidden_states.dtype)
    for expert in range(experts.num_experts):
        chosen, place = (torch.zeros(tokens, dtype=torch.long) for _ in range(2))
        output = _run_expert(experts, expert, hidden_states[chosen]) * weights[chosen, place, None]
        result.index_add_(0, chosen, output.to(result.dtype))
    return result


def _run_expert(experts: Any, expert: int, tokens: torch.Tensor) -> torch.Tensor:
    from transformers.integrations.moe import _default_apply_gate

    if not experts.has_gate:
        inner = experts.act_fn(_apply(experts, "up_proj", expert, tokens))
    elif type(experts)._apply_gate is _default_apply_gate:
        gate, up = (_apply(experts, "gate_up_proj", expert, tokens, half) for half in (0, 1))
        inner = experts.act_fn(gate) * up
    else:
        inner = experts._apply_gate(_apply(experts, "gate_up_proj", expert, tokens))
    return _apply(experts, "down_proj", expert, inner)


def _apply(experts: Any, name: str, expert: int, tokens: torch.Tensor, half: int | None = None) -> torch.Tensor:
    """Apply the layer ``name`` of ``expert``, or one ``half`` of its outputs."""
    weight, transposed = getattr(experts, name), experts.is_transposed
    outputs = weight.shape[2 if transposed else 1]
    start, end = (0, outputs) if half is None else (half * outputs // 2, (half + 1) * outputs // 2)
    bias = getattr(experts, f"{name}_bias")[expert, start:end] if experts.has_bias else None
    return linear(tokens, _Rows.apply(weight, expert, start, end, transposed), bias)
