"""Full fine-tuning with frozen weights, under every strategy: trained as without them, resumed, and merged."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardmake.config.models import Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.memory.model import find_frozen
from shardmake.run.paths import RunDir
from tests.workflow.forked import Forked, log

pytestmark = pytest.mark.training
FREEZE = ["model.embed_tokens", "*.mlp", "model.layers.0", "!model.layers.0.input_layernorm"]
Weights = dict[str, torch.Tensor]


def train(forked: Forked, rundir: RunDir, strategy: Strategy, **changes: Any) -> tuple[dict[int, float], Weights]:
    """Train four steps without clipping, the last two again; return the losses and the merged weights in fp32."""
    saves = {"checkpoints": {"every_steps": 1, "keep": 4}}
    given = {"scheduler": "constant", "warmup_ratio": 0.0, "max_grad_norm": 1e6, "weight_decay": 0.1, **saves}
    planned = forked.plan(strategy, 2, **given | changes)
    assert forked.train(rundir, planned) == [0, 0], log(rundir)
    shutil.rmtree(rundir.checkpoints / "checkpoint-3")
    uninterrupted = forked.assert_repeats(rundir, planned)
    assert len(uninterrupted) == 4
    base = forked.checkout.root / "resources/demo/base"
    consolidate(rundir.checkpoints / "checkpoint-4", rundir.model, base=base, dtype="keep")
    return uninterrupted, load_file(rundir.model / "model.safetensors")


@pytest.fixture(scope="module")
def reference(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], Weights]:
    """Losses and weights under DDP, whose first step changes the trained weights as without frozen ones, no others."""
    folder = tmp_path_factory.mktemp("freeze")
    found = train(forked, RunDir(folder / "run"), "ddp", freeze=FREEZE)
    train(forked, RunDir(folder / "whole"), "ddp")
    base = load_file(forked.checkout.root / "resources/demo/base/model.safetensors")
    first = [RunDir(folder / name).checkpoints / "checkpoint-1/model.safetensors" for name in ("run", "whole")]
    part, whole = map(load_file, first)
    frozen = find_frozen(base, FREEZE)
    assert 0 < len(frozen) < len(base)
    for name, tensor in part.items():
        torch.testing.assert_close(tensor, (base if name in frozen else whole)[name].float(), rtol=0, atol=0)
        assert name in frozen or not torch.equal(tensor, base[name])
    return found


@pytest.mark.parametrize("strategy", ["zero1", "zero2-offload", "zero3", "fsdp", "fsdp-offload"])
def test_frozen_weights_stay_as_they_are(
    forked: Forked, reference: tuple[dict[int, float], Weights], tmp_path: Path, strategy: Strategy
) -> None:
    found, weights = train(forked, RunDir(tmp_path / "run"), strategy, freeze=FREEZE)
    base = load_file(forked.checkout.root / "resources/demo/base/model.safetensors")
    assert found == pytest.approx(reference[0], abs=2e-4)
    for name in find_frozen(base, FREEZE):
        assert torch.equal(weights[name], base[name].to(weights[name].dtype)), name
    torch.testing.assert_close({name: weights[name] for name in reference[1]}, reference[1], atol=1e-4, rtol=1e-3)
