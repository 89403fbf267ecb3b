"""Fixtures for tests of one rank in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

ENDED: list[dist.ProcessGroup] = []
"""Groups of ended tests. The destructor of a group joins its threads while it holds the interpreter's lock, and a thread
that releases an all-reduce waits for that lock. So the last reference stays until no thread has work."""


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """Start a process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD
    ENDED.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()
