"""Training on completions with labels equals plain TRL, resumes as if it had not stopped, and is evaluated."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardmake.config.models import Cluster, Run, Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.evaluate.stage import evaluate
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from tests.workflow.checkout import Checkout
from tests.workflow.forked import Forked, log
from tests.workflow.sweep import Sweep
from tests.workflow.test_preferences import (
    KILLED,
    REQUIRED,
    SETTINGS,
    assert_counts_tensors,
    assert_fallback_after_out_of_memory,
    assert_killed_training_recovers,
    assert_resumes,
    assert_stopped_training_resumes,
    metrics,
    plain_trl,
)

pytestmark = pytest.mark.training
SCRIPT = Path(__file__).with_name("scripts") / "trl_kto.py"
KTO: dict[str, Any] = SETTINGS | {
    "objective": "kto",
    "kto": {"desirable_weight": 3.0},
    "data": {"train": "completions.jsonl", "eval": "held_out.jsonl", "order": "given"},
}
IN_CI = ("full", "zero3")
OFFLOADED = ("zero1-offload", "zero2-offload", "zero3-offload-optimizer", "zero3-offload", "fsdp-offload")
ON_DEMAND = [
    *(("full", name) for name in ("ddp", "zero1", "zero2", "fsdp", "fsdp-grad-op", *OFFLOADED)),
    *(("lora", name) for name in ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op")),
    *(("lora", name) for name in ("zero2-offload", "zero3-offload", "fsdp-offload")),
]
PRECOMPUTED = [
    *(("full", name) for name in ("ddp", "zero2", "zero3", "zero3-offload", "fsdp")),
    *(("lora", name) for name in ("ddp", "zero2", "fsdp")),
]
"""Cases of a reference that runs once before the first step."""
Training = tuple[Plan, Run, Cluster]


@pytest.fixture(scope="module")
def completions(forked: Forked, tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Forked:
    return with_completions(forked, tmp_path_factory.mktemp("completions") / "checkout", inputs)


def with_completions(forked: Forked, folder: Path, inputs: Path) -> Forked:
    """Return a checkout with completions: in turn the answer of a conversation, and its words in reversed order."""
    checkout = Checkout.create(folder, inputs)
    messages = [json.loads(line)["messages"] for line in (inputs / "train.jsonl").read_text().splitlines()[:60]]
    lines = [json.dumps(_example(*turns, label=n % 2 == 0)) for n, turns in enumerate(messages)]
    (checkout.root / "completions.jsonl").write_text("\n".join(lines[:48]))
    (checkout.root / "held_out.jsonl").write_text("\n".join(lines[48:]))
    checkout.configure({"processes_per_node": 2}, strategy="ddp", nodes=1, global_batch_size=12, **KTO)
    checkout("shardmake", "data", "demo")
    return Forked(checkout, forked.server)


def _example(question: dict[str, str], answer: dict[str, str], *, label: bool) -> dict[str, Any]:
    worse = {"role": "assistant", "content": "No: " + " ".join(reversed(answer["content"].split()))}
    return {"prompt": [question], "completion": [answer if label else worse], "label": label}


@pytest.fixture(scope="module")
def trl_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what TRL alone writes."""
    return tmp_path_factory.mktemp("trl")


@pytest.fixture(scope="module")
def plain(completions: Forked, trl_models: Path) -> Callable[[str], list[dict[str, Any]]]:
    """Return what TRL alone logs at each step under DDP, by method, with "-precomputed" after it for such a reference."""
    return cache(lambda method: plain_trl(SCRIPT, completions.checkout.root, "completions.jsonl", method, trl_models))


def planned(completions: Forked, method: str, strategy: Strategy, reference: str = "model") -> Training:
    return completions.plan(strategy, 2, **with_method(method, reference))


def with_method(method: str, reference: str) -> dict[str, Any]:
    """Return the settings of a run."""
    return KTO | {"method": method, "kto": {**KTO["kto"], "reference": reference}}


@pytest.mark.parametrize(
    ("method", "strategy"), [IN_CI, *(pytest.param(*case, marks=pytest.mark.objectives) for case in ON_DEMAND)]
)
def test_kto_equals_plain_trl_resumes_and_is_evaluated(
    completions: Forked,
    tmp_path: Path,
    method: str,
    strategy: Strategy,
    plain: Callable[[str], list[dict[str, Any]]],
    trl_models: Path,
) -> None:
    rundir, training = RunDir(tmp_path / "run"), planned(completions, method, strategy)
    assert completions.train(rundir, training) == [0, 0], log(rundir)
    _assert_trained_as(plain(method), rundir)
    assert_resumes(completions, rundir, training, method)
    if method == "full":
        _assert_model_and_evaluation(rundir, training, trl_models / f"{method}.json.model")


@pytest.mark.objectives
@pytest.mark.parametrize(("method", "strategy"), PRECOMPUTED)
def test_a_precomputed_reference_trains_kto_as_trl_with_its_own(
    completions: Forked, tmp_path: Path, method: str, strategy: Strategy, plain: Callable[[str], list[dict[str, Any]]]
) -> None:
    """TRL computes the log-probabilities before the first step too; a training that resumes reads the first one's."""
    rundir, training = RunDir(tmp_path / "run"), planned(completions, method, strategy, "precomputed")
    assert completions.train(rundir, training) == [0, 0], log(rundir)
    _assert_trained_as(plain(f"{method}-precomputed"), rundir)
    (file,) = rundir.train.glob("reference-*.safetensors")
    again = assert_resumes(completions, rundir, training, method)
    assert (again.train / file.name).stat().st_mtime_ns == file.stat().st_mtime_ns
    assert metrics(again)[-1]["eval_rewards"] == metrics(rundir)[-1]["eval_rewards"]


def _assert_trained_as(theirs: list[dict[str, Any]], rundir: RunDir) -> None:
    """Check the metrics of each step against what TRL logs."""
    lines = metrics(rundir)
    trained = [line for line in lines if "loss" in line]
    assert len(theirs) == 4
    for line, expected in zip(trained, theirs, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert line["kl"] == pytest.approx(expected["kl"], abs=1e-3)
        assert line["rewards"] == pytest.approx(
            {name: expected[f"rewards/{name}"] for name in line["rewards"]}, abs=1e-4
        )
    assert sorted(trained[0]["rewards"]) == ["chosen", "margins", "rejected"]
    assert trained[-1]["rewards"]["margins"] > 0
    assert max(line["kl"] for line in trained) > 0, trained


def _assert_model_and_evaluation(rundir: RunDir, training: Training, theirs: Path) -> None:
    """Check the weights against those that TRL saves, and the rewards against those that training measured."""
    plan, run, _ = training
    consolidate(rundir.checkpoints / "checkpoint-4", rundir.model, base=Path(run.model), workers=1)
    found, expected = (load_file(folder / "model.safetensors") for folder in (rundir.model, theirs))
    assert sorted(found) == sorted(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5, msg=name)
    plan.write(rundir.plan)
    scores = evaluate(run, rundir).completions
    assert scores is not None and (scores.desirable, scores.undesirable) == (6, 6)
    measured = metrics(rundir)[-1]["eval_rewards"]  # means over batches with other numbers of each label
    assert dict(scores.rewards) == pytest.approx(measured, rel=0.05)
    assert 0.5 < scores.accuracy <= 1


@pytest.mark.objectives
@pytest.mark.parametrize(
    ("method", "strategy", "reference"),
    [*((*case, "model") for case in KILLED), ("full", "zero2", "precomputed")],
    ids=[*map("-".join, KILLED), "full-zero2-precomputed"],
)
def test_killed_in_a_save_kto_resumes_bit_for_bit(
    completions: Forked, tmp_path: Path, method: str, strategy: Strategy, reference: str
) -> None:
    settings = with_method(method, reference)
    assert_killed_training_recovers(Sweep(completions, tmp_path, strategy, victim=0, settings=settings))


@pytest.mark.objectives
@pytest.mark.parametrize(("method", "strategy"), [*(("full", name) for name in REQUIRED), ("lora", "ddp")])
def test_a_stop_file_saves_kto_and_training_resumes_bit_for_bit(
    completions: Forked, tmp_path: Path, method: str, strategy: Strategy
) -> None:
    assert_stopped_training_resumes(completions, tmp_path, planned(completions, method, strategy), method)


@pytest.mark.objectives
@pytest.mark.parametrize(("strategy", "reference"), [("zero2", "precomputed"), ("zero2", "model"), ("zero3", "model")])
def test_the_plan_counts_the_tensors_of_a_rank(
    completions: Forked, tmp_path: Path, strategy: Strategy, reference: str
) -> None:
    assert_counts_tensors(completions, RunDir(tmp_path / "run"), planned(completions, "full", strategy, reference))


@pytest.mark.objectives
@pytest.mark.parametrize("strategy", REQUIRED)
def test_after_out_of_memory_kto_resumes_with_the_next_fallback(
    completions: Forked, plain: Callable[[str], list[dict[str, Any]]], strategy: Strategy
) -> None:
    assert_fallback_after_out_of_memory(completions, planned(completions, "full", strategy), plain("full"))
