"""The tracer of the memory tests."""

from typing import Any

import pytest


@pytest.fixture(scope="module")
def tracer() -> Any:
    """The tracer in this process: one start of torch for all cases. It replaces functions of torch."""
    from torch import nn, softmax

    from shardmake.memory import gpu_kernels, tracer

    kept = {name: getattr(nn.functional, name) for name in (*gpu_kernels.ORIGINALS, "dropout", "grouped_mm")}
    yield tracer
    for name, function in kept.items():
        setattr(nn.functional, name, function)
    import torch

    torch.softmax = softmax
