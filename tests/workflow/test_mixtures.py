"""A mixture of experts trains alike under every library, resumes with its experts, and merges as save_pretrained."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM

from shardmake.config.models import Cluster, Run, Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from tests.mixtures import save_mixture
from tests.workflow.forked import Forked, log

pytestmark = pytest.mark.training
Losses = dict[int, float]


@pytest.fixture(scope="module")
def base(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral with the demo's tokenizer, whose loss includes that of its routers."""
    demo, folder = forked.checkout.root / "resources/demo/base", tmp_path_factory.mktemp("mixture") / "base"
    return save_mixture("mixtral", demo, folder, output_router_logits=True, router_aux_loss_coef=0.1)


def planned(forked: Forked, base: Path, strategy: Strategy) -> tuple[Plan, Run, Cluster]:
    return forked.plan(
        strategy,
        2,
        model=str(base),
        micro_batch_size=6,
        checkpoints={"every_steps": 2},
        learning_rate=2e-3,
    )


def losses(rundir: RunDir) -> Losses:
    lines = (json.loads(line) for line in rundir.metrics.read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture(scope="module")
def reference(forked: Forked, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Losses under DDP with Trainer; the loop repeats the second half from Trainer's checkpoint, bit for bit."""
    rundir = RunDir(tmp_path_factory.mktemp("mixture") / "run")
    assert forked.train(rundir, planned(forked, base, "ddp")) == [0, 0], log(rundir)
    found, weights = losses(rundir), load_file(rundir.checkpoints / "checkpoint-4/model.safetensors")
    shutil.rmtree(rundir.checkpoints / "checkpoint-4")
    half = rundir.checkpoints / "checkpoint-2"
    assert forked.train(rundir, planned(forked, base, "ddp"), resume_from=half) == [0, 0], log(rundir)
    assert losses(rundir) == pytest.approx(found, rel=1e-6)
    again = load_file(rundir.checkpoints / "checkpoint-4/model.safetensors")
    for name, tensor in weights.items():
        torch.testing.assert_close(again[name], tensor, atol=1e-6, rtol=1e-5)
    assert_merges_like(rundir, base, weights)
    return found


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_losses_equal_ddp_and_the_merge_equals_save_pretrained(
    forked: Forked, base: Path, reference: Losses, tmp_path: Path, strategy: Strategy
) -> None:
    """The fixture ``reference`` compares the merge under DDP."""
    rundir = RunDir(tmp_path / "run")
    assert forked.train(rundir, planned(forked, base, strategy)) == [0, 0], log(rundir)
    assert losses(rundir) == pytest.approx(reference, abs=2e-4)
    checkpoint = rundir.checkpoints / "checkpoint-4"
    if strategy == "fsdp":
        dcp_to_torch_save(checkpoint / "pytorch_model_fsdp_0", tmp_path / "official.pt")
        state = torch.load(tmp_path / "official.pt", weights_only=True)["model"]
    else:
        state = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    assert_merges_like(rundir, base, state)


def assert_merges_like(rundir: RunDir, base: Path, state: dict[str, Any]) -> None:
    """Compare the merge of the last checkpoint with ``save_pretrained`` of a model with the parameters ``state``."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.load_state_dict({name: tensor[:] for name, tensor in state.items()})
    model.save_pretrained(rundir.root / "expected")
    consolidate(rundir.checkpoints / "checkpoint-4", rundir.model, base=base)
    merged = load_file(rundir.model / "model.safetensors")
    expected = load_file(rundir.root / "expected/model.safetensors")
    assert merged.keys() == expected.keys() == load_file(base / "model.safetensors").keys()
    assert [name for name in merged if not torch.equal(merged[name], expected[name])] == []
