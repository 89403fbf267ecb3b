"""A mixture of experts trains alike under every library, resumes with its experts, and merges as the libraries do."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardmake.config.models import Cluster, Method, Run, Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from tests.mixtures import save_mixture
from tests.workflow.forked import Forked, log, losses, official_weights

pytestmark = pytest.mark.training
Losses = dict[int, float]


@pytest.fixture(scope="module")
def base(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral with the demo's tokenizer, whose loss includes that of its routers."""
    demo, folder = forked.checkout.root / "resources/demo/base", tmp_path_factory.mktemp("mixture") / "base"
    return save_mixture("mixtral", demo, folder, output_router_logits=True, router_aux_loss_coef=0.1)


def planned(forked: Forked, base: Path, strategy: Strategy, method: Method) -> tuple[Plan, Run, Cluster]:
    lora = {"learning_rate": 1e-2, "lora": {"rank": 4}} if method == "lora" else {"learning_rate": 2e-3}
    return forked.plan(
        strategy, 2, model=str(base), micro_batch_size=6, checkpoints={"every_steps": 2}, method=method, **lora
    )


@pytest.fixture(scope="module", params=["full", "lora"])
def reference(
    forked: Forked, base: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Method, Losses]:
    """Losses under DDP with Trainer; the loop repeats the second half from Trainer's checkpoint, bit for bit."""
    rundir, method = RunDir(tmp_path_factory.mktemp("mixture") / "run"), request.param
    assert forked.train(rundir, planned(forked, base, "ddp", method)) == [0, 0], log(rundir)
    file = f"checkpoint-4/{'model' if method == 'full' else 'adapter_model'}.safetensors"
    found, weights = losses(rundir), load_file(rundir.checkpoints / file)
    shutil.rmtree(rundir.checkpoints / "checkpoint-4")
    half = rundir.checkpoints / "checkpoint-2"
    assert forked.train(rundir, planned(forked, base, "ddp", method), resume_from=half) == [0, 0], log(rundir)
    assert losses(rundir) == pytest.approx(found, rel=1e-6)
    torch.testing.assert_close(load_file(rundir.checkpoints / file), weights, atol=1e-6, rtol=1e-5)
    assert_merges_like(rundir, base, weights if method == "full" else None)
    return method, found


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_losses_equal_ddp_and_the_merge_equals_save_pretrained(
    forked: Forked, base: Path, reference: tuple[Method, Losses], tmp_path: Path, strategy: Strategy
) -> None:
    """The fixture ``reference`` compares the merge under DDP; with adapters, PEFT merges them into every expert."""
    rundir, (method, of_ddp) = RunDir(tmp_path / "run"), reference
    assert forked.train(rundir, planned(forked, base, strategy, method)) == [0, 0], log(rundir)
    assert losses(rundir) == pytest.approx(of_ddp, abs=2e-4)
    state = official_weights(rundir.checkpoints / "checkpoint-4", strategy) if method == "full" else None
    assert_merges_like(rundir, base, state)


SPREAD: dict[str, dict[str, Any]] = {
    "2 ranks": {"ranks": 2, "expert_parallel": 2, "micro_batch_size": 3},
    "4 ranks share the experts": {"ranks": 4, "expert_parallel": 4, "gradient_checkpointing": True},
    "2 groups of 2 ranks": {"ranks": 4, "expert_parallel": 2},
}


@pytest.mark.parametrize("layout", SPREAD)
def test_spread_experts_train_as_under_ddp_and_merge(forked: Forked, base: Path, tmp_path: Path, layout: str) -> None:
    """Ranks have different data, and every expert gets the gradients of all of it."""
    common = {"model": str(base), "checkpoints": {"every_steps": 2}, "learning_rate": 2e-3}
    changes = common | SPREAD[layout]
    ranks, reference, spread = changes.pop("ranks"), RunDir(tmp_path / "ddp"), RunDir(tmp_path / "spread")
    assert forked.train(reference, forked.plan("ddp", ranks, **common)) == [0] * ranks, log(reference)
    assert forked.train(spread, forked.plan("fsdp", ranks, **changes)) == [0] * ranks, log(spread)
    assert losses(spread) == pytest.approx(losses(reference), abs=2e-4)
    assert_merges_like(spread, base, official_weights(spread.checkpoints / "checkpoint-4", "fsdp"))


def assert_merges_like(rundir: RunDir, base: Path, state: dict[str, Any] | None) -> None:
    """Compare the merge of the last checkpoint with ``save_pretrained`` of a model with the parameters ``state``.

    Without them, PEFT merges the checkpoint's adapters.
    """
    checkpoint, model = rundir.checkpoints / "checkpoint-4", AutoModelForCausalLM.from_pretrained(base)
    if state is None:
        consolidate(checkpoint, rundir.root / "adapter", base=base, adapter=True)
        model = PeftModel.from_pretrained(model, rundir.root / "adapter").merge_and_unload()
    else:
        model.load_state_dict({name: tensor[:] for name, tensor in state.items()})
    model.save_pretrained(rundir.root / "expected")
    consolidate(checkpoint, rundir.model, base=base)
    merged, before = (load_file(folder / "model.safetensors") for folder in (rundir.model, base))
    expected = load_file(rundir.root / "expected/model.safetensors")
    assert merged.keys() == expected.keys() == before.keys()
    wrong = [n for n in merged if not torch.allclose(merged[n], expected[n], atol=1e-6 if state is None else 0, rtol=0)]
    assert wrong == []
    assert [name for name in merged if ".experts." in name and torch.equal(merged[name], before[name])] == []
