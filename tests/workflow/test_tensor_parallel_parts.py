"""The part of a model that the plan counts on a tensor-parallel rank is the one that DeepSpeed's AutoTP leaves there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardmake.memory.families import part_of
from shardmake.memory.read_config import from_config
from tests.autotp_shapes import CONFIGS, SHARED

pytestmark = pytest.mark.training
RANKS = 4


@pytest.mark.full
def test_the_plan_counts_the_part_of_a_rank(tmp_path: Path) -> None:
    """Names and shapes of four families, with and without biases and tied heads, on two groups of two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    done = subprocess.run(
        [*command, "-m", "tests.autotp_shapes", str(tmp_path / "shapes.json")], capture_output=True, text=True,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "shapes.json").read_text())
    for config, (shapes, flat) in zip(CONFIGS, found, strict=True):
        part = part_of(from_config(config), SHARED)
        assert {tensor.name: list(tensor.shape) for tensor in part.tensors} == shapes
        assert flat == pytest.approx(part.parameters / (RANKS // SHARED), rel=1e-3)
