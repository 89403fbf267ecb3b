"""The exchange around an attention kernel, with a group of threads in place of ranks."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shardmake.core.errors import ModelError
from shardmake.data.varlen import register_cpu_kernel, varlen_attention
from shardmake.train.sequence_parallel import check_parts, shared_kernel

HEADS, GROUPS, WIDTH, TOKENS = 8, 4, 8, 32


@dataclass
class Board:
    """A place at which the threads of one group exchange tensors."""

    size: int
    notes: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.notes[rank] = tensor
        self.barrier.wait(60)
        found = [self.notes[other] for other in range(self.size)]
        self.barrier.wait(60)
        return found


@dataclass
class Group:
    """A rank's view of its group."""

    board: Board
    rank: int


@pytest.fixture(autouse=True)
def groups_of_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    def all_to_all(group: Group, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([other[group.rank] for other in group.board.exchange(group.rank, tensor)])

    def all_gather(into: list[torch.Tensor], tensor: torch.Tensor, group: Group) -> None:
        for target, source in zip(into, group.board.exchange(group.rank, tensor), strict=True):
            target.copy_(source)

    comm = SimpleNamespace(
        get_world_size=lambda group: group.board.size, get_rank=lambda group=None: 0, all_gather=all_gather
    )
    monkeypatch.setattr(ulysses_sp, "dist", comm)
    monkeypatch.setattr(ulysses_sp, "_dim_zero_all_to_all", all_to_all)
    monkeypatch.setattr(ulysses_sp, "register_all_to_all_group", lambda group: None)
    yield


def on_ranks(ranks: int, function: Callable[[Group], torch.Tensor]) -> torch.Tensor:
    """Return the results of all ranks, one after the other along the tokens."""
    board = Board(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        return torch.cat(list(pool.map(function, [Group(board, rank) for rank in range(ranks)])), dim=1)


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query = torch.randn(rows, HEADS, TOKENS, WIDTH)
    return query, torch.randn(rows, GROUPS, TOKENS, WIDTH), torch.randn(rows, GROUPS, TOKENS, WIDTH)


def shared(kernel: Any, ranks: int, rows: int, **arguments: Any) -> torch.Tensor:
    config = LlamaConfig(hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_key_value_heads=GROUPS)
    module = torch.nn.Module()
    tensors = inputs(rows)
    module.is_causal, module.num_key_value_groups = True, HEADS // GROUPS  # type: ignore[assignment]

    def attend(group: Group) -> torch.Tensor:
        parts = [tensor.chunk(ranks, dim=2)[group.rank] for tensor in tensors]
        positions = torch.arange(TOKENS).expand(rows, TOKENS).chunk(ranks, dim=1)[group.rank]
        mask = torch.zeros(1)  # of a part, and so not used
        made = shared_kernel(kernel, config, group, rows=rows)  # type: ignore[arg-type]
        return made(module, *parts, mask, position_ids=positions, scaling=0.3, **arguments)[0]

    together = on_ranks(ranks, attend)
    whole = kernel(module, *tensors, None, scaling=0.3, **arguments)[0]
    torch.testing.assert_close(together, whole.reshape(rows, TOKENS, -1), atol=1e-5, rtol=1e-5)
    return together


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_attend_as_whole_rows(ranks: int) -> None:
    shared(sdpa_attention_forward, ranks, rows=2)


def test_packed_examples_stay_apart_with_varlen() -> None:
    """The boundaries are those of the whole row; one of them is within a part."""
    register_cpu_kernel()
    bounds = torch.tensor([0, 11, 24, TOKENS], dtype=torch.int32)
    packed = shared(varlen_attention, 4, rows=1, cu_seq_lens_q=bounds, max_length_q=13)
    alone = shared(varlen_attention, 4, rows=1)
    assert torch.allclose(packed[:, :11], alone[:, :11], atol=1e-5)
    assert not torch.allclose(packed[:, 11:], alone[:, 11:], atol=1e-2)


def test_other_logits_on_parts_are_refused() -> None:
    expected = torch.randn(2, 8, 16)
    check_parts(expected + 1e-5, expected)
    check_parts((expected + 0.02).bfloat16(), expected.bfloat16())
    with pytest.raises(ModelError, match="computes other logits on parts of a sequence"):
        check_parts(expected + 0.1, expected)
