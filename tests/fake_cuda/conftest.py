"""Tests with the build of torch for CUDA on a machine without a GPU; ``make test-fake-cuda`` installs it apart."""

import pytest
import torch


def pytest_configure() -> None:
    """Refuse a build without CUDA: no test here could say anything about a GPU."""
    if torch.version.cuda is None:
        raise pytest.UsageError(f"torch {torch.__version__} is a build without CUDA. Run: make test-fake-cuda")
