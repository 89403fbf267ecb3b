"""A merge of a damaged checkpoint gives the same bytes or a `CheckpointError`, in little memory and time."""

import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.consolidate_flips import SAME
from tests.unit.consolidate.test_source_checks import write_zero

ROOT = Path(__file__).parents[4]


def test_flipped_bits_and_truncations(tmp_path: Path) -> None:
    for stage in (2, 3):
        write_zero(tmp_path / f"zero{stage}", stage)
    dcp.save({"model": {"a": torch.ones(3, 2), "b": torch.ones(4)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    checkpoints = [tmp_path / name for name in ("zero2", "zero3", "dcp")]
    command = [sys.executable, "-m", "benchmarks.consolidate_flips", *checkpoints, "--count", "60"]
    subprocess.run([*command, "--out", tmp_path / "flips.json"], check=True, cwd=ROOT)
    merges = json.loads((tmp_path / "flips.json").read_text())["merges"]
    assert len(merges) == 6
    for outcomes in merges.values():
        assert outcomes.keys() == {"CheckpointError", SAME, "peak_mib", "peak_mib_undamaged"}, outcomes
        assert outcomes["peak_mib"] < outcomes["peak_mib_undamaged"] + 32
