"""Fixtures for tests of one rank in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from transformers import LlamaConfig, LlamaForCausalLM

ENDED: list[dist.ProcessGroup] = []
"""Groups of ended tests. The destructor of a group joins its threads while it holds the interpreter's lock, and a thread
that releases an all-reduce waits for that lock. So the last reference stays until no thread has work."""


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD
    ENDED.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


def in_ranks(function: Callable[[int, Path], None], folder: Path, ranks: int, start_method: str = "fork") -> None:
    """Call ``function`` with its rank and ``folder`` in processes that gloo connects; a fork cannot run autograd."""
    store = str(folder.parent / f"{folder.name}-store")
    start_processes(_run_rank, (function, folder, store, ranks), nprocs=ranks, start_method=start_method)


def _run_rank(rank: int, function: Callable[[int, Path], None], folder: Path, store: str, ranks: int) -> None:
    torch.set_num_threads(1)  # a fork has none of the parent's threads
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    function(rank, folder)
    dist.barrier()


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "vocab_size": 32, "pad_token_id": 0, **changes}))
