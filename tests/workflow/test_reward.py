"""Training of a reward model equals plain TRL on the same pairs, and resumes as if it had not stopped.

The final model is the one that TRL saves: a sequence classifier with one output, without the base model's head.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardmake.config.models import Cluster, Run, Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.evaluate.stage import evaluate
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from tests.workflow.forked import Forked, branch, log
from tests.workflow.sweep import Sweep
from tests.workflow.test_preferences import (
    KILLED,
    REQUIRED,
    assert_counts_tensors,
    assert_fallback_after_out_of_memory,
    assert_killed_training_recovers,
    metrics,
    plain_trl,
    with_pairs,
)

pytestmark = pytest.mark.training
SCRIPT = Path(__file__).with_name("scripts") / "trl_reward.py"
SETTINGS: dict[str, Any] = {
    "objective": "reward",
    "reward": {"center_rewards_coefficient": 0.01},
    "packing": False,
    "data": {"train": "pairs.jsonl", "eval": "held_out.jsonl", "order": "given"},
    "evaluation": {"batch_tokens": 2048},
    "sequence_length": 128,
    "micro_batch_size": 3,
    "max_steps": 4,
    "epochs": None,
    "learning_rate": 2e-3,
    "warmup_ratio": 0.25,
    "checkpoints": {"every_steps": 2},
    "eval_every_steps": 2,
}
OFFLOADED = ("zero1-offload", "zero2-offload", "zero3-offload-optimizer", "zero3-offload", "fsdp-offload")
CASES = [("full", "ddp")]
OTHERS = [
    ("lora", "ddp"),
    *((method, name) for name in ("zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op") for method in ("full", "lora")),
    *(("full", name) for name in OFFLOADED),
    *(("lora", name) for name in ("zero1-offload", "zero2-offload", "zero3-offload", "fsdp-offload")),
]
ON_DEMAND = pytest.mark.objectives
SCORES = ("accuracy", "margin", "min_reward", "mean_reward", "max_reward")


@pytest.fixture(scope="module")
def pairs(forked: Forked, tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Forked:
    """A checkout with pairs, whose base model has a head of its own."""
    checkout = with_pairs(forked, tmp_path_factory.mktemp("pairs") / "checkout", inputs, SETTINGS)
    untie(checkout.checkout.root / "resources/demo/base")
    return checkout


def untie(base: Path) -> None:
    """Give the model in ``base`` a head that is not tied to its embedding."""
    config, weights = json.loads((base / "config.json").read_text()), load_file(base / "model.safetensors")
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    head = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, base / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def plain(
    pairs: Forked, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[list[dict[str, Any]], Path]]:
    """Return what TRL alone logs at each step under DDP, by method, and the folder of its model."""
    folder = tmp_path_factory.mktemp("trl")

    def train(method: str) -> tuple[list[dict[str, Any]], Path]:
        lines = plain_trl(SCRIPT, pairs.checkout.root, "pairs.jsonl", method, folder)
        return lines, folder / f"{method}.json.model"

    return cache(train)


def planned(pairs: Forked, method: str, strategy: Strategy) -> tuple[Plan, Run, Cluster]:
    return pairs.plan(strategy, 2, method=method, **SETTINGS)


@pytest.mark.parametrize(("method", "strategy"), [*CASES, *(pytest.param(*case, marks=ON_DEMAND) for case in OTHERS)])
def test_a_reward_model_equals_that_of_plain_trl_and_resumes(
    pairs: Forked,
    tmp_path: Path,
    method: str,
    strategy: Strategy,
    plain: Callable[[str], tuple[list[dict[str, Any]], Path]],
) -> None:
    """Losses, gradient norms and scores of every step are TRL's; a second half from the checkpoint is the same.

    The evaluation of the final model has the accuracy and margin that the training measured at its end.
    """
    rundir = RunDir(tmp_path / "run")
    training = planned(pairs, method, strategy)
    assert pairs.train(rundir, training) == [0, 0], log(rundir)
    lines, saved = plain(method)
    assert len(lines) == 4
    trained = [line for line in metrics(rundir) if "loss" in line]
    for line, expected in zip(trained, lines, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        for name in SCORES:
            assert line["reward_scores"][name] == pytest.approx(expected[name], abs=1e-4), name
    assert trained[-1]["reward_scores"]["margin"] > trained[0]["reward_scores"]["margin"]
    assert [sorted(line["eval_reward_scores"]) for line in metrics(rundir) if "eval_loss" in line] == [
        sorted(SCORES)
    ] * 2

    again = branch(rundir, tmp_path / "again")
    shutil.rmtree(again.checkpoints / "checkpoint-4")
    codes = pairs.train(again, training, resume_from=again.checkpoints / "checkpoint-2")
    assert codes == [0, 0], log(again)
    whole, resumed = (merged(one, training) for one in (rundir, again))
    assert sorted(whole) == sorted(resumed)
    assert [name for name in whole if not whole[name].equal(resumed[name])] == []
    if method == "full":
        theirs = load_file(saved / "model.safetensors")
        assert sorted(whole) == sorted(theirs)
        for name, weight in theirs.items():
            torch.testing.assert_close(whole[name], weight, rtol=0, atol=1e-5, msg=name)
        training[0].write(rundir.plan)
        found, measured = evaluate(training[1], rundir), metrics(rundir)[-1]["eval_reward_scores"]
        assert found.scores is None and found.reward_model is not None and found.reward_model.pairs == 12
        assert found.reward_model.accuracy == pytest.approx(measured["accuracy"])
        assert found.reward_model.margin == pytest.approx(measured["margin"], abs=1e-4)


def merged(rundir: RunDir, training: tuple[Plan, Run, Cluster]) -> dict[str, torch.Tensor]:
    """Return the weights of the final model by name."""
    plan, run, _ = training
    last, kind = rundir.checkpoints / "checkpoint-4", plan.workload.model_class
    consolidate(last, rundir.model, base=Path(run.model), model_class=kind, workers=1)
    config = json.loads((rundir.model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["pad_token_id"] is not None
    return load_file(rundir.model / "model.safetensors")


@pytest.mark.objectives
@pytest.mark.parametrize(("method", "strategy"), KILLED)
def test_killed_in_a_save_a_reward_model_resumes_bit_for_bit(
    pairs: Forked, tmp_path: Path, method: str, strategy: Strategy
) -> None:
    """Rank 0 is killed halfway through a file of states, and before the rename that commits the checkpoint."""
    assert_killed_training_recovers(Sweep(pairs, tmp_path, strategy, victim=0, settings=SETTINGS | {"method": method}))


@pytest.mark.objectives
@pytest.mark.parametrize(("method", "strategy"), [*(("full", name) for name in REQUIRED), ("lora", "fsdp")])
def test_a_stop_file_saves_a_reward_model_and_training_resumes_bit_for_bit(
    pairs: Forked, tmp_path: Path, method: str, strategy: Strategy
) -> None:
    whole, stopped = RunDir(tmp_path / "whole"), RunDir(tmp_path / "stopped")
    training = planned(pairs, method, strategy)
    assert pairs.train(whole, training) == [0, 0], log(whole)
    stopped.train.mkdir(parents=True)
    stopped.stop_file.touch()
    assert pairs.train(stopped, training) == [0, 0], log(stopped)
    stopped.stop_file.unlink(missing_ok=True)
    codes, resumed = pairs.resume(stopped, training)
    assert codes == [0, 0] and resumed is not None and resumed.step == 1, log(stopped)
    expected, found = (merged(one, training) for one in (whole, stopped))
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if not expected[name].equal(found[name])] == []


@pytest.mark.objectives
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_the_plan_counts_the_tensors_of_a_rank(pairs: Forked, tmp_path: Path, strategy: Strategy) -> None:
    assert_counts_tensors(pairs, RunDir(tmp_path / "run"), planned(pairs, "full", strategy))


@pytest.mark.objectives
@pytest.mark.parametrize("strategy", REQUIRED)
def test_after_out_of_memory_a_reward_model_resumes_with_the_next_fallback(
    pairs: Forked, plain: Callable[[str], tuple[list[dict[str, Any]], Path]], strategy: Strategy
) -> None:
    assert_fallback_after_out_of_memory(pairs, planned(pairs, "full", strategy), plain("full")[0])
