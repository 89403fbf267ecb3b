"""The exchange around an attention kernel between ranks, and the parts of a batch's rows: together the whole rows."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed import init_distributed
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shardmake.core.environment import leave_collectives_to_gloo
from shardmake.core.errors import ModelError
from shardmake.data.dataset import IGNORED, Collator, Item
from shardmake.data.varlen import register_cpu_kernel, varlen_attention
from shardmake.train.sequence_parallel import PartCollator, check_parts, shared_kernel
from tests.unit.train.conftest import in_ranks

HEADS, GROUPS, WIDTH, TOKENS = 8, 4, 8, 32


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query = torch.randn(rows, HEADS, TOKENS, WIDTH)
    return query, torch.randn(rows, GROUPS, TOKENS, WIDTH), torch.randn(rows, GROUPS, TOKENS, WIDTH)


def compare(rank: int, folder: Path, *, kernel: Any, rows: int, **arguments: Any) -> None:
    """Compare this rank's part of the attention with that part of the whole."""
    leave_collectives_to_gloo()
    init_distributed(verbose=False)
    ranks = dist.get_world_size()
    config = LlamaConfig(hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_key_value_heads=GROUPS)
    module: Any = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, HEADS // GROUPS
    tensors = inputs(rows)
    parts = [tensor.chunk(ranks, dim=2)[rank] for tensor in tensors]
    positions = torch.arange(TOKENS).expand(rows, TOKENS).chunk(ranks, dim=1)[rank]
    mask = torch.zeros(1)  # of a part, and so not used
    assert dist.group.WORLD
    shared = shared_kernel(kernel, config, dist.group.WORLD, rows=rows)
    part = shared(module, *parts, mask, position_ids=positions, scaling=0.3, **arguments)[0]
    whole = kernel(module, *tensors, None, scaling=0.3, **arguments)[0].reshape(rows, TOKENS, -1)
    torch.testing.assert_close(part, whole.chunk(ranks, dim=1)[rank], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_attend_as_whole_rows(ranks: int, tmp_path: Path) -> None:
    in_ranks(partial(compare, kernel=sdpa_attention_forward, rows=2), tmp_path, ranks)


def test_packed_examples_stay_apart_with_varlen(tmp_path: Path) -> None:
    """The boundaries are those of the whole row; one of them is within a part."""
    register_cpu_kernel()
    bounds = torch.tensor([0, 11, 24, TOKENS], dtype=torch.int32)
    packed = {"cu_seq_lens_q": bounds, "max_length_q": 13}
    in_ranks(partial(compare, kernel=varlen_attention, rows=1, **packed), tmp_path, 4)
    module: Any = SimpleNamespace(is_causal=True, num_key_value_groups=HEADS // GROUPS)
    together, apart = (varlen_attention(module, *inputs(1), None, scaling=0.3, **one)[0] for one in ({}, packed))
    assert torch.allclose(apart[:, :11], together[:, :11], atol=1e-5)
    assert not torch.allclose(apart[:, 11:], together[:, 11:], atol=1e-2)


def test_other_logits_on_parts_are_refused() -> None:
    expected = torch.randn(2, 8, 16)
    check_parts(expected + 1e-5, expected)
    check_parts((expected + 0.02).bfloat16(), expected.bfloat16())
    with pytest.raises(ModelError, match="computes other logits on parts of a sequence"):
        check_parts(expected + 0.1, expected)


def item(tokens: int, first: int) -> Item:
    ids = torch.arange(tokens) + 3
    positions = torch.cat([torch.arange(first), torch.arange(tokens - first)])
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_parts_are_together_the_whole_batch(packing: bool, flat: bool) -> None:
    """Labels are those of the next token, also at the end of a part; a padded row without packing counts on."""
    whole, items = Collator(16, 0, packing, flat=packing and flat), [item(13, 5), item(16, 7)]
    parts = [PartCollator(whole, index, 4)(items) for index in range(4)]
    batch = whole(items)
    rows, tokens = batch["input_ids"].shape
    names = ("input_ids", "labels", "shift_labels", "position_ids")
    joined = {name: torch.cat([part[name] for part in parts], dim=1) for name in names}
    assert torch.equal(joined["input_ids"], batch["input_ids"]) and torch.equal(joined["labels"], batch["labels"])
    assert torch.equal(joined["shift_labels"][:, :-1], batch["labels"][:, 1:])
    assert (joined["shift_labels"][:, -1] == IGNORED).all()
    counted = batch["position_ids"] if packing else torch.arange(tokens).expand(rows, tokens)
    assert torch.equal(joined["position_ids"], counted)
    for part in parts:
        assert "attention_mask" not in part
        if packing and flat:
            assert torch.equal(part["cu_seq_lens_q"], batch["cu_seq_lens_q"]), "of the whole row"
            assert part["max_length_q"] == batch["max_length_q"]


def test_the_length_of_the_rows_can_change() -> None:
    short = PartCollator(Collator(64, 0, packing=False, flat=False), 1, 2).with_length(16)
    assert short([item(10, 5)])["input_ids"].tolist() == [[11, 12, 0, 0, 0, 0, 0, 0]]
