"""The GPU of each rank of an evaluation, with simulated GPUs."""

from types import SimpleNamespace

import pytest
import torch

from shardmake.evaluate.backends import RankInfo, process_group


@pytest.mark.parametrize(("rank", "gpu"), [(RankInfo(0, 1), 0), (RankInfo(3, 4), 3), (RankInfo(5, 8), 1)])
def test_the_gpu_of_a_rank_alone_is_current(monkeypatch: pytest.MonkeyPatch, rank: RankInfo, gpu: int) -> None:
    """The model is on it; Triton's kernels run on the current GPU, wherever their tensors are."""
    current: list[int] = []
    gpus = SimpleNamespace(is_available=lambda: True, device_count=lambda: 4, set_device=current.append)
    monkeypatch.setattr(torch, "cuda", gpus)
    with process_group(rank):
        assert current == [gpu]
