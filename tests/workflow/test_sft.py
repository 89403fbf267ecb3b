"""Supervised fine-tuning equals plain TRL on the same examples, through a kill, a stop and a fallback as well.

Packed sequences are in other tests: TRL packs them for kernels that need a GPU.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardmake.config.models import Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.run.paths import RunDir
from tests.workflow.checkout import Checkout
from tests.workflow.forked import Forked, log
from tests.workflow.sweep import Sweep
from tests.workflow.test_preferences import (
    REQUIRED,
    SETTINGS,
    assert_fallback_after_out_of_memory,
    assert_killed_training_recovers,
    assert_resumes,
    assert_stopped_training_resumes,
    metrics,
    plain_trl,
)

pytestmark = [pytest.mark.training, pytest.mark.objectives]
SCRIPT = Path(__file__).with_name("scripts") / "trl_sft.py"
SFT: dict[str, Any] = SETTINGS | {
    "objective": "sft",
    "data": {"train": "answered.jsonl", "eval": "held_out.jsonl", "order": "given"},
}


@pytest.fixture(scope="module")
def answered(forked: Forked, tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Forked:
    """A checkout with prompts and completions."""
    checkout = Checkout.create(tmp_path_factory.mktemp("answered") / "checkout", inputs)
    messages = [json.loads(line)["messages"] for line in (inputs / "train.jsonl").read_text().splitlines()[:60]]
    lines = [json.dumps({"prompt": [question], "completion": [answer]}) for question, answer in messages]
    (checkout.root / "answered.jsonl").write_text("\n".join(lines[:48]))
    (checkout.root / "held_out.jsonl").write_text("\n".join(lines[48:]))
    checkout.configure({"processes_per_node": 2}, strategy="ddp", nodes=1, global_batch_size=12, **SFT)
    checkout("shardmake", "data", "demo")
    return Forked(checkout, forked.server)


@pytest.fixture(scope="module")
def trl_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what TRL alone writes."""
    return tmp_path_factory.mktemp("trl")


@pytest.fixture(scope="module")
def plain(answered: Forked, trl_models: Path) -> Callable[[], list[dict[str, Any]]]:
    """Return what TRL alone logs at each step under DDP."""
    return cache(lambda: plain_trl(SCRIPT, answered.checkout.root, "answered.jsonl", "full", trl_models))


@pytest.mark.parametrize("strategy", REQUIRED)
def test_sft_equals_plain_trl_and_resumes(
    answered: Forked,
    tmp_path: Path,
    strategy: Strategy,
    plain: Callable[[], list[dict[str, Any]]],
    trl_models: Path,
) -> None:
    """Losses and gradient norms of every step, and the final model, are TRL's."""
    rundir, training = RunDir(tmp_path / "run"), answered.plan(strategy, 2, **SFT)
    assert answered.train(rundir, training) == [0, 0], log(rundir)
    trained, theirs = [line for line in metrics(rundir) if "loss" in line], plain()
    assert len(theirs) == 4
    for line, expected in zip(trained, theirs, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert_resumes(answered, rundir, training, "full")
    consolidate(rundir.checkpoints / "checkpoint-4", rundir.model, base=Path(training[1].model), workers=1)
    ours, saved = (load_file(folder / "model.safetensors") for folder in (rundir.model, trl_models / "full.json.model"))
    assert sorted(ours) == sorted(saved)
    for name, weight in saved.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("strategy", REQUIRED)
def test_killed_in_a_save_sft_resumes_bit_for_bit(answered: Forked, tmp_path: Path, strategy: Strategy) -> None:
    assert_killed_training_recovers(Sweep(answered, tmp_path, strategy, victim=0, settings=SFT))


@pytest.mark.parametrize("strategy", REQUIRED)
def test_a_stop_file_saves_sft_and_training_resumes_bit_for_bit(
    answered: Forked, tmp_path: Path, strategy: Strategy
) -> None:
    assert_stopped_training_resumes(answered, tmp_path, answered.plan(strategy, 2, **SFT), "full")


@pytest.mark.parametrize("strategy", REQUIRED)
def test_after_out_of_memory_sft_resumes_with_the_next_fallback(
    answered: Forked, plain: Callable[[], list[dict[str, Any]]], strategy: Strategy
) -> None:
    assert_fallback_after_out_of_memory(answered, answered.plan(strategy, 2, **SFT), plain())
