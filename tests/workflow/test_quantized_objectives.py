"""QLoRA with the objectives of TRL: training equals TRL with bitsandbytes alone, resumes bit for bit, and merges."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from shardmake.config.models import Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.run.model_class import ModelClass
from shardmake.run.paths import RunDir
from tests.fork_server import REPOSITORY
from tests.workflow import test_kto, test_preferences, test_reward
from tests.workflow.forked import Forked, log
from tests.workflow.sweep import Sweep
from tests.workflow.test_preferences import (
    assert_killed_training_recovers,
    assert_resumes,
    metrics,
    plain_trl,
    with_pairs,
)
from tests.workflow.test_quantized import PACKAGES, quantizing

__all__ = ["quantizing"]

pytestmark = pytest.mark.training
SETTINGS: dict[str, dict[str, Any]] = {
    objective: settings | {"method": "qlora", "precision": "bf16"}
    for objective, settings in (
        ("dpo", test_preferences.SETTINGS),
        ("kto", test_kto.KTO),
        ("reward", test_reward.SETTINGS),
    )
}
SCRIPTS = {"dpo": test_preferences.SCRIPT, "kto": test_kto.SCRIPT, "reward": test_reward.SCRIPT}
DATA = {"dpo": "pairs.jsonl", "kto": "completions.jsonl", "reward": "pairs.jsonl"}
IN_CI = ("dpo", "zero2")
ON_DEMAND = [
    (objective, strategy)
    for objective in SETTINGS
    for strategy in ("ddp", "zero1", "zero2", "fsdp")
    if (objective, strategy) != IN_CI
]
LOSS, NORM, REWARD = 6e-3, 0.01, 0.02
"""Absolute difference of losses, relative one of gradient norms, and absolute one of rewards: rounding to bf16.

TRL itself holds the adapters in bf16 here; ours are in fp32, or have a master copy.
"""
Prepared = Callable[[str], Forked]


@pytest.fixture(scope="module")
def prepared(quantizing: Forked, tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Prepared:
    """Return a checkout with the data of an objective."""

    def prepare(objective: str) -> Forked:
        folder = tmp_path_factory.mktemp(objective) / "checkout"
        if objective == "kto":
            return test_kto.with_completions(quantizing, folder, inputs)
        found = with_pairs(quantizing, folder, inputs, SETTINGS[objective] | {"method": "lora"})
        if objective == "reward":
            test_reward.untie(found.checkout.root / "resources/demo/base")
        return found

    return cache(prepare)


@pytest.fixture(scope="module")
def plain(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """Return what TRL alone logs at each step under DDP, by objective."""
    folder = tmp_path_factory.mktemp("trl")

    def train(objective: str) -> list[dict[str, Any]]:
        checkout = prepared(objective).checkout.root
        return plain_trl(
            SCRIPTS[objective], checkout, DATA[objective], "qlora", folder / objective, REPOSITORY, PACKAGES
        )

    return cache(train)


@pytest.mark.parametrize(
    ("objective", "strategy"),
    [IN_CI, *(pytest.param(*case, marks=pytest.mark.objectives) for case in ON_DEMAND)],
)
def test_qlora_equals_plain_trl_and_resumes(
    prepared: Prepared,
    tmp_path: Path,
    objective: str,
    strategy: Strategy,
    plain: Callable[[str], list[dict[str, Any]]],
) -> None:
    """Adapters that resume end with the same bits. A reward under ZeRO has the 8 bits of its layer's output."""
    rundir, forked = RunDir(tmp_path / "run"), prepared(objective)
    training = forked.plan(strategy, 2, **SETTINGS[objective])
    assert forked.train(rundir, training) == [0, 0], log(rundir)
    ours, theirs = [line for line in metrics(rundir) if "loss" in line], plain(objective)
    for line, expected in zip(ours, theirs, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], abs=LOSS)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=NORM)
        for name, value in (line.get("rewards") or line["reward_scores"]).items():
            assert value == pytest.approx(expected[name if "reward_scores" in line else f"rewards/{name}"], abs=REWARD)
    assert_resumes(forked, rundir, training, "lora")
    assert_merges_as_peft(objective, forked, rundir, training[0].workload.model_class)


def assert_merges_as_peft(objective: str, forked: Forked, rundir: RunDir, model_class: ModelClass) -> None:
    """Compare the merged model with the base model in 32 bits to which PEFT adds the trained adapter."""
    base, last = forked.checkout.root / "resources/demo/base", rundir.checkpoints / "checkpoint-4"
    consolidate(last, rundir.model, base=base, model_class=model_class, workers=1)
    kind = AutoModelForSequenceClassification if objective == "reward" else AutoModelForCausalLM
    loaded = kind.from_pretrained(base, dtype=torch.float32, **({"num_labels": 1} if objective == "reward" else {}))
    adapter = rundir.root.with_name("merged-run")
    expected = PeftModel.from_pretrained(loaded, adapter).merge_and_unload().state_dict()
    merged = load_file(rundir.model / "model.safetensors")
    assert "score.weight" in merged if objective == "reward" else any("q_proj" in name for name in merged)
    for name, weight in merged.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.objectives
@pytest.mark.parametrize(("objective", "strategy"), [("dpo", "fsdp"), ("kto", "ddp"), ("reward", "zero2")])
def test_killed_in_a_save_qlora_resumes_bit_for_bit(
    prepared: Prepared, tmp_path: Path, objective: str, strategy: Strategy
) -> None:
    sweep = Sweep(prepared(objective), tmp_path, strategy, victim=0, settings=SETTINGS[objective])
    assert_killed_training_recovers(sweep)
