"""The replacement of the experts' grouped product against torch's own on real tensors."""

from collections.abc import Callable

import pytest
import torch

from shardmake.memory.gpu_kernels import _grouped_product

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
def test_the_grouped_product_saves_what_torchs_does(trained: bool) -> None:
    tokens = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16, requires_grad=trained)
    ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (TOKENS // EXPERTS)
    own = {ends.untyped_storage().data_ptr()}
    theirs = _saved(lambda: torch.nn.functional.grouped_mm(tokens, weight, offs=ends), own)
    assert _saved(lambda: _grouped_product(tokens, weight), own) == theirs
