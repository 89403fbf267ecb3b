"""Rates of some weights, Muon, and trained tokens: as in a plain Trainer, resumed, and merged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments, get_scheduler

from shardmake.config.models import Strategy
from shardmake.core.errors import ConfigError
from shardmake.core.private_names import named_arguments
from shardmake.data.dataset import Sequences, collator
from shardmake.memory.model import find_frozen
from shardmake.memory.read_config import read_model
from shardmake.render.training_file import training_settings
from shardmake.train.load_model import load_model
from shardmake.train.sharded_trainer import WholeBatches
from tests.workflow.forked import Forked, Weights
from tests.workflow.test_recipes import OFTEN

pytestmark = [pytest.mark.training, pytest.mark.usefixtures("loading_in_process")]
RATE = 2e-3
RATES = {"*.mlp": 1e-2, "model.embed_tokens": 1e-4, "model.layers.0.*_proj": 5e-4, "model.norm": 5e-3}
GIVEN: dict[str, Any] = {
    "full": {"learning_rates": RATES, "weight_decay": 0.1},
    "lora": {"method": "lora", "learning_rates": {"*.lora_B": 16 * RATE}, "weight_decay": 0.0},
    "tokens": {"method": "lora", "lora": {"train_tokens": ["<|im_end|>", "z"]}, "weight_decay": 0.0},
    "muon": {"optimizer": "muon", "learning_rates": RATES, "weight_decay": 0.1},
    "muon, some frozen": {"optimizer": "muon", "freeze": ["*.k_proj", "model.norm"], "weight_decay": 0.1},
    "muon, lora": {"optimizer": "muon", "method": "lora", "weight_decay": 0.1},
}
STRATEGIES = ("ddp", "zero1", "zero2-offload", "zero3", "zero3-offload", "fsdp", "fsdp-offload")
CASES = [
    *((kind, strategy) for kind in GIVEN if "muon" not in kind for strategy in STRATEGIES),
    *(("muon", strategy) for strategy in ("ddp", "zero2", "zero3", "fsdp")), ("muon, some frozen", "fsdp-grad-op"),
    *(("muon, lora", strategy) for strategy in ("ddp", "zero1", "fsdp")),
]  # fmt: skip
SCHEDULE = {"learning_rate": RATE, "max_grad_norm": 1e6, "scheduler": "linear", "warmup_ratio": 0.5, "packing": False}


def optimizer_of(model: Any, kind: str) -> torch.optim.Optimizer:
    """Return AdamW with groups that are written out here, with torch's Muon after its steps, or PEFT's own of LoRA+."""
    if kind == "lora":
        return create_loraplus_optimizer(model, torch.optim.AdamW, lr=RATE, loraplus_lr_ratio=16, weight_decay=0.0)
    named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if kind == "tokens":
        return torch.optim.AdamW(named.values(), lr=RATE, weight_decay=0.0)
    rates = dict.fromkeys(named, RATE)
    for pattern, rate in GIVEN[kind].get("learning_rates", {}).items():
        rates |= dict.fromkeys(find_frozen(named, [pattern]), rate)
    decay = {True: 0.0, False: 0.1}
    groups = {one: {"params": [named[one]], "lr": rates[one], "weight_decay": decay["norm" in one]} for one in named}
    matrices = [groups.pop(name) for name in named if "muon" in kind and "_proj" in name]
    if not groups:
        return torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW([*groups.values()])
    if matrices:
        muon, peaks = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"), [one["lr"] for one in matrices]

        def step(*_: Any) -> None:
            for group, peak in zip(muon.param_groups, peaks, strict=True):
                group["lr"] = peak * adam.param_groups[0]["lr"] / adam.param_groups[0]["initial_lr"]
            muon.step()

        adam.register_step_post_hook(step)
    return adam


@pytest.fixture(scope="module")
def plain(
    request: pytest.FixtureRequest, forked: Forked, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[int, float], Weights]:
    """The kind, and the losses and weights of transformers' Trainer alone on one rank."""
    plan, run, cluster = forked.plan("ddp", 1, **SCHEDULE, **GIVEN[request.param])
    settings = training_settings(plan, run, cluster, read_model(run.model))
    del settings.arguments["ddp_backend"]
    arguments = TrainingArguments(str(tmp_path_factory.mktemp("plain")), **named_arguments(settings.arguments))
    arguments.save_strategy = arguments.eval_strategy = "no"
    model = load_model(settings, arguments)
    optimizer = optimizer_of(model, request.param)
    data = forked.checkout.run / "data"
    rows = WholeBatches(Sequences(data, "train"), plan.choice.global_batch_size)
    optimizers = (optimizer, get_scheduler("linear", optimizer, 2, 4))
    trainer = Trainer(model, arguments, collator(data, "sdpa"), rows, optimizers=optimizers)
    trainer.train()
    losses = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
    merged = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    return request.param, losses, merged.state_dict()


@pytest.mark.parametrize(("plain", "strategy"), CASES, indirect=["plain"])
def test_groups_train_as_in_a_plain_trainer_and_resume(
    forked: Forked, plain: tuple[str, dict[int, float], Weights], tmp_path: Path, strategy: Strategy
) -> None:
    kind, losses, expected = plain
    if kind == "tokens" and strategy.startswith(("zero3", "fsdp")):
        with pytest.raises(ConfigError, match=f"cannot be used under {strategy}"):
            forked.plan(strategy, 2, **GIVEN[kind])
        return
    run = forked.trained(tmp_path, strategy, **OFTEN, **SCHEDULE, **GIVEN[kind]).repeat()
    assert run.losses() == pytest.approx(losses, abs=2e-4)
    base = load_file(run.base / "model.safetensors")
    for name, tensor in run.merged().items():
        wanted = expected[name].float()
        if "muon" in kind:  # bf16 amplifies how sums are rounded; tests/unit/train/test_muon.py is exact
            assert (tensor.float() - wanted).norm() <= 0.1 * (wanted - base[name].float()).norm(), name
        else:
            torch.testing.assert_close(tensor.float(), wanted, atol=1e-4, rtol=1e-3)
