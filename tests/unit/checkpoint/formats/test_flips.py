"""A damaged checkpoint yields the same plan or a `CheckpointError`, in little memory and time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.unit.checkpoint.formats import flips
from tests.unit.consolidate.test_source_checks import write_zero


@pytest.mark.parametrize("kind", ["zero2", "zero3", "dcp"])
def test_flipped_bits_and_truncations(kind: str, tmp_path: Path) -> None:
    if kind == "dcp":
        dcp.save({"model": {"a": torch.ones(3, 2), "b": torch.ones(4)}}, checkpoint_id=tmp_path, no_dist=True)
    else:
        write_zero(tmp_path, int(kind[-1]))
    command = [sys.executable, flips.__file__, tmp_path, "200", "1"]
    outcomes = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert outcomes["CheckpointError"] > 50 and outcomes["same plan"] > 10
    assert outcomes.keys() <= {"CheckpointError", "same plan", "peak MiB", "other names"}
    if kind != "dcp":  # only .metadata has no checksum of its own
        assert "other names" not in outcomes
