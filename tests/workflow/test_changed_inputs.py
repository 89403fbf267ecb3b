"""Weights and data that changed since their fetch are not used, and a checkpoint's weights can be a start."""

import json
import os
import shutil
from pathlib import Path

import pytest

from shardmake.core.atomic import sealed, unsealed, write_json
from tests.workflow.checkout import Checkout

pytestmark = pytest.mark.training


def flip(path: Path) -> None:
    """Flip a bit in the middle, in place, and give the file its times back."""
    times, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def forget_changes(checkout: Checkout, weights: Path) -> None:
    """Let the receipt have the file's present time, as when the disk itself damaged it."""
    path = checkout.run / "fetched/weights.json"
    receipt = unsealed(json.loads(path.read_text()))
    receipt["changed_at"] = {str(weights): weights.stat().st_ctime_ns}
    write_json(path, sealed(receipt))


def test_a_flipped_bit_stops_every_later_stage(checkout: Checkout) -> None:
    checkout.configure(method="lora", strategy="ddp", checkpoints={"every_steps": 2, "keep": 3})
    checkout.stages("fetch", "plan", "render", "data", "train")
    uninterrupted = checkout.losses()
    (checkout.run / "train/receipt.json").unlink()
    for step in (4, 6):
        shutil.rmtree(checkout.run / f"train/checkpoints/checkpoint-{step}")
    weights = checkout.root / "resources/demo/base/model.safetensors"
    (data,) = (checkout.run / "data/train").glob("*.arrow")
    attempts = checkout.run / "train/attempts"

    def refused(stage: str, path: Path) -> None:
        found = checkout("shardmake", stage, "demo", check=False)
        assert found.returncode == 2 and f"{path} has other content" in found.stdout
        assert "Restore the file" in found.stdout

    flip(weights)
    refused("train", weights)
    assert not (attempts / "002").exists(), "found before a job was queued"
    forget_changes(checkout, weights)
    refused("train", weights)
    assert "train_loss" not in (attempts / "002/node-0.log").read_text() and not (attempts / "002/ranks").exists()
    flip(weights)
    flip(data)
    refused("train", data)
    flip(data)
    assert "resuming from checkpoint-2" in checkout("shardmake", "train", "demo").stdout
    assert checkout.losses() == uninterrupted
    checkout("shardmake", "consolidate", "demo")
    flip(weights)
    for stage in ("consolidate", "evaluate"):
        refused(stage, weights)
    flip(weights)
    checkout.configure(resume_from="runs/demo/train/checkpoints/checkpoint-6")
    said = checkout("shardmake", "fetch", "demo", "--runs", "later").stdout
    assert "Its optimizer states, schedule and step are not taken over." in said
    started = checkout.root / "later/demo/fetched/model/model.safetensors"
    assert started.read_bytes() == (checkout.run / "model/model.safetensors").read_bytes(), "adapters are merged"
