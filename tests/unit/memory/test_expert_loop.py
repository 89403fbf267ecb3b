"""Experts one after the other, and in one grouped product, against the libraries' own code on real tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from shardmake.memory.closed_form import of_events
from shardmake.memory.expert_loop import _run_experts
from shardmake.memory.gpu_kernels import _grouped_product
from shardmake.memory.read_config import from_config
from shardmake.memory.scenario import LibraryBehavior
from shardmake.memory.stack import parse_stack
from shardmake.memory.trace import _request
from tests.unit.memory.test_decoder import SIZES, gradients, saved, scenario

EXPERTS, TOKENS, HIDDEN, INNER = 4, 32, 8, 24


def _saved(function: Callable[[], torch.Tensor], without: set[int]) -> list[int]:
    """Return the bytes of the storages that ``function`` saves for its backward pass, but those at ``without``."""
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sorted(t.untyped_storage().nbytes() for place, t in kept.items() if place not in without)


@pytest.mark.parametrize("trained", [False, True])
def test_the_loop_saves_what_transformers_loop_saves(trained: bool) -> None:
    """Of the weights, that of transformers 5 is one tensor for gate and up, whose product is one tensor too."""
    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS)
    config._experts_implementation = "eager"
    experts = MixtralExperts(config).requires_grad_(trained)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True) * 1
    chosen = torch.arange(2 * TOKENS).reshape(TOKENS, 2) % EXPERTS
    weights = torch.rand(TOKENS, 2, requires_grad=True) * 1
    known = {tensor.untyped_storage().data_ptr() for tensor in (*experts.parameters(), hidden, weights)}
    theirs = _saved(lambda: experts(hidden, chosen, weights), known)
    ours = _saved(lambda: _run_experts(experts, hidden, chosen, weights), known)
    assert sum(ours) == pytest.approx(sum(theirs), rel=0.02)


@pytest.mark.parametrize("trained", [False, True])
def test_the_grouped_product_saves_what_torchs_does(trained: bool) -> None:
    tokens = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16, requires_grad=trained)
    ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (TOKENS // EXPERTS)
    own = {ends.untyped_storage().data_ptr()}
    theirs = _saved(lambda: torch.nn.functional.grouped_mm(tokens, weight, offs=ends), own)
    assert _saved(lambda: _grouped_product(tokens, weight), own) == theirs


def test_experts_run_in_a_loop_before_transformers_5(tracer: Any) -> None:
    """``index_add_`` saves what it adds beside the rest; the backward pass has one expert's temporaries at a time."""
    model = from_config({**SIZES, "model_type": "mixtral", "num_local_experts": 8, "num_hidden_layers": 2})
    case = {"model": model, "method": "lora", "lora_targets": ("q_proj",)}
    events = {
        loops: tracer.trace(_request(scenario(**case, behavior=LibraryBehavior(loops_over_experts=loops))))
        for loops in (False, True)
    }
    pairs = 2 * scenario(**case).tokens
    added = 2 * 2 * pairs * SIZES["hidden_size"]
    assert saved(events[True]) - saved(events[False]) == pytest.approx(added, rel=0.02)
    grouped, looped = (of_events(events[loops], 2) for loops in (False, True))
    assert grouped.first_layer - looped.first_layer > 2 * pairs * SIZES["intermediate_size"]
    assert parse_stack("transformers=4.57").behavior().loops_over_experts
    assert not parse_stack("transformers=5.0").behavior().loops_over_experts


def test_trained_experts_in_a_loop_get_one_gradient_each_weight(tracer: Any) -> None:
    model = from_config({**SIZES, "model_type": "mixtral", "num_local_experts": 4, "num_hidden_layers": 2})
    case = scenario(model=model, behavior=LibraryBehavior(loops_over_experts=True))
    assert gradients(tracer.trace(_request(case))) >= {tensor.name for tensor in model.tensors if tensor.block == 0}
