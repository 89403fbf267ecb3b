"""Every objective equals plain TRL on the same examples, resumes as if it had not stopped, and survives faults.

The final model is the one that TRL saves, and its evaluation has the scores that the training measured. Packed sequences
are in other tests: TRL packs them for kernels that need a GPU.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from shardmake.config.models import Strategy
from shardmake.evaluate.stage import evaluate
from shardmake.memory import host, states
from shardmake.plan.planner import buckets_of, scenario_of
from shardmake.plan.resolve import resolve
from shardmake.run.paths import RunDir
from tests.workflow.forked import Forked, Trained, Weights, log, metrics
from tests.workflow.objectives import OBJECTIVES, Row, Trainings, settings_of
from tests.workflow.sweep import Sweep

pytestmark = pytest.mark.training
ON_DEMAND = pytest.mark.objectives


# Which cases run in `make test-all`, and which in `make test-objectives` alone.
REQUIRED: tuple[Strategy, ...] = ("ddp", "zero2", "zero3", "fsdp")
"""Strategies under which every objective has a test of a stop file and of a fallback."""
OFFLOADED = ("zero1-offload", "zero2-offload", "zero3-offload-optimizer", "zero3-offload", "fsdp-offload")
FULL = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op", *OFFLOADED)
LORA = {
    "dpo": ("ddp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload", "fsdp", "fsdp-offload"),
    "kto": ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op", "zero2-offload", "zero3-offload", "fsdp-offload"),
    "reward": (*(name for name in FULL if name != "zero3-offload-optimizer"),),
}
IN_CI = (
    "dpo full ddp", "dpo lora ddp", "dpo full zero3", "dpo full fsdp", "kto full zero3", "reward full ddp",
    "dpo qlora zero2", "dpo full fsdp precomputed",
)  # fmt: skip
ALIKE = ("dpo", "kto", "reward")
CASES = [
    *(f"{name} full {strategy}" for name in OBJECTIVES for strategy in (REQUIRED if name == "sft" else FULL)),
    *(f"{name} lora {strategy}" for name, strategies in LORA.items() for strategy in strategies),
    *(f"{name} qlora {strategy}" for name in ALIKE for strategy in ("ddp", "zero1", "zero2", "fsdp")),
    # The reference runs once before the first step.
    *(f"dpo full {strategy} precomputed" for strategy in FULL),
    *(f"dpo lora {strategy} precomputed" for strategy in LORA["dpo"]),
    *(f"kto full {strategy} precomputed" for strategy in ("ddp", "zero2", "zero3", "zero3-offload", "fsdp")),
    *(f"kto lora {strategy} precomputed" for strategy in ("ddp", "zero2", "fsdp")),
]
EVERYWHERE = [f"{name} full {strategy}" for name in OBJECTIVES for strategy in REQUIRED]
KILLED = [
    *EVERYWHERE, *(f"{name} lora fsdp" for name in ALIKE), "kto full zero2 precomputed", "dpo qlora fsdp",
    "kto qlora ddp", "reward qlora zero2",
]  # fmt: skip
STOPPED = [*EVERYWHERE, "dpo lora fsdp", "kto lora ddp", "reward lora fsdp"]
COUNTED = [
    *(f"dpo full {strategy}" for strategy in ("zero2", "zero3", "zero3-offload")), "kto full zero2 precomputed",
    *(f"{name} full {strategy}" for name in ("kto", "reward") for strategy in ("zero2", "zero3")),
]  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in IN_CI else ON_DEMAND) for case in CASES])
def test_training_equals_plain_trl_and_resumes(trainings: Trainings, tmp_path: Path, case: str) -> None:
    """Losses, gradient norms and scores of every step are TRL's; a second half from the checkpoint is the same.

    TRL runs the reference of DPO in every step; a training that resumes reads the log-probabilities of the first.
    """
    run, (theirs, model) = trainings.train(tmp_path, case), trainings.trl(case)
    assert_trained_as(theirs, run)
    files = {file: file.stat().st_mtime_ns for file in run.rundir.train.glob("reference-*.safetensors")}
    assert len(files) == ("precomputed" in case)
    assert_resumes(run)
    assert {file: file.stat().st_mtime_ns for file in files} == files
    if files and "dpo" in case:
        (shapes,) = ({name: tuple(values.shape) for name, values in load_file(file).items()} for file in files)
        assert shapes == {"train": (48, 2), "eval": (12, 2)}
    if " full " in case and not files:
        assert_model_and_evaluation(run, model)
    if "qlora" in case:
        assert_merges_as_peft(run)


def assert_trained_as(theirs: list[Row], run: Trained) -> None:
    """Check the metrics of each step against what TRL logs.

    With adapters on 4 bits, ours are in fp32 or have a master copy, and TRL's are rounded to bf16.
    """
    objective, rounded = run.planned[1].objective, run.planned[1].method == "qlora"
    row = OBJECTIVES[objective]
    loss, norm, score, kl = (6e-3, 0.01, 0.02, math.inf) if rounded else (1e-5, 1e-3, 1e-4, 1e-3)
    lines = metrics(run.rundir)
    trained = [line for line in lines if "loss" in line]
    assert len(theirs) == 4
    for line, expected in zip(trained, theirs, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], abs=loss)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=norm)
        assert sorted(line.get(row.scores, ())) == sorted(row.names)
        for name in row.names:
            assert line[row.scores][name] == pytest.approx(expected[row.theirs.format(name)], abs=score), name
        if objective == "kto":
            assert line["kl"] == pytest.approx(expected["kl"], abs=kl)
    evaluated = [sorted(line.get(f"eval_{row.scores}", ())) for line in lines if "eval_loss" in line]
    assert evaluated == [sorted(row.names)] * 2
    if rounded or objective == "sft":
        return
    first, *_, last = (line[row.scores].get("margins", line[row.scores].get("margin")) for line in trained)
    assert last > (first if objective != "kto" else 0)
    assert objective != "dpo" or first == 0
    assert objective != "kto" or max(line["kl"] for line in trained) > 0, trained


def assert_resumes(run: Trained) -> None:
    """Train the second half again from the checkpoint, and compare every bit."""
    whole, measured = merged(run, "whole"), metrics(run.rundir)[-1]
    run.repeat()
    assert_same(whole, merged(run, "resumed"))
    scores = [key for key in measured if key.startswith("eval_re")]
    assert {key: metrics(run.rundir)[-1][key] for key in scores} == {key: measured[key] for key in scores}


def assert_same(one: Weights, other: Weights) -> None:
    assert sorted(one) == sorted(other)
    assert [name for name in one if not one[name].equal(other[name])] == []
    assert not any(".ref." in name for name in one)


def merged(run: Trained, out: str) -> Weights:
    """Return the weights of the final model by name; of adapters for a language model, those of the adapter alone."""
    given = run.planned[1]
    is_reward = given.objective == "reward" and given.method != "qlora"
    weights = run.merged(out, adapter=given.method != "full" and not is_reward, workers=1)
    if is_reward:
        config = json.loads((run.rundir.root / out / "config.json").read_text())
        assert config["architectures"] == ["LlamaForSequenceClassification"] and config["pad_token_id"] is not None
    return weights


def assert_model_and_evaluation(run: Trained, theirs: Path) -> None:
    """Check the weights against those that TRL saves, and the scores against those that training measured."""
    objective = run.planned[1].objective
    torch.testing.assert_close(run.merged(workers=1), load_file(theirs / "model.safetensors"), rtol=0, atol=1e-5)
    if objective == "sft":
        return
    run.planned[0].write(run.rundir.plan)
    result = evaluate(run.planned[1], run.rundir)
    measured = metrics(run.rundir)[-1][f"eval_{OBJECTIVES[objective].scores}"]
    if objective == "dpo":
        assert result.preferences is not None and result.preferences.pairs == 12
        rewards = dict(result.preferences.rewards)
        assert rewards == pytest.approx({name: measured[name] for name in rewards}, abs=1e-4)
    elif objective == "kto":
        scores = result.completions
        assert scores is not None and (scores.desirable, scores.undesirable) == (6, 6)
        assert dict(scores.rewards) == pytest.approx(measured, rel=0.05)  # batches have other numbers of each label
        assert 0.5 < scores.accuracy <= 1
    else:
        assert result.scores is None and result.reward_model is not None and result.reward_model.pairs == 12
        assert result.reward_model.accuracy == pytest.approx(measured["accuracy"])
        assert result.reward_model.margin == pytest.approx(measured["margin"], abs=1e-4)


def assert_merges_as_peft(run: Trained) -> None:
    """Compare the merged model with the base model in 32 bits to which PEFT adds the adapter of `assert_resumes`."""
    found, objective = run.merged(workers=1), run.planned[1].objective
    kind = AutoModelForSequenceClassification if objective == "reward" else AutoModelForCausalLM
    loaded = kind.from_pretrained(run.base, dtype=torch.float32, **({"num_labels": 1} if objective == "reward" else {}))
    expected = PeftModel.from_pretrained(loaded, run.rundir.root / "whole").merge_and_unload().state_dict()
    assert "score.weight" in found if objective == "reward" else any("q_proj" in name for name in found)
    torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=0, atol=1e-5)


@ON_DEMAND
@pytest.mark.parametrize("strategy", REQUIRED)
def test_precomputed_log_probabilities_keep_their_precision_in_bf16(
    trainings: Trainings, tmp_path: Path, strategy: Strategy
) -> None:
    """Before the first update the model is the reference. Rounded to bf16, a log-probability would be off by 0.5."""
    given = trainings.forked("dpo full")
    forked = Forked(given.checkout, given.server)  # whose launcher has bf16
    run = forked.trained(tmp_path, strategy, **settings_of("dpo", "full", "precomputed"), precision="bf16")
    first = metrics(run.rundir)[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards"]["chosen"] == first["rewards"]["rejected"] == 0


@ON_DEMAND
@pytest.mark.parametrize("case", KILLED)
def test_killed_in_a_save_it_resumes_bit_for_bit(trainings: Trainings, tmp_path: Path, case: str) -> None:
    """Rank 0 is killed halfway through a file of states, and before the rename that commits the checkpoint."""
    objective, method, strategy, *reference = case.split()
    settings = settings_of(objective, method, *reference)
    sweep = Sweep(trainings.forked(case), tmp_path, strategy, victim=0, settings=settings)
    sweep.prepare()
    assert len(sweep.chosen()) == 2, sweep.points
    sweep.assert_recovers(sweep.chosen())


@ON_DEMAND
@pytest.mark.parametrize("case", STOPPED)
def test_a_stop_file_saves_and_training_resumes_bit_for_bit(trainings: Trainings, tmp_path: Path, case: str) -> None:
    """Stop a training after its first step, resume it, and compare every bit with one that did not stop."""
    whole = trainings.train(tmp_path / "whole", case)
    stopped = Trained(whole.forked, RunDir(tmp_path / "stopped"), whole.planned)
    stopped.rundir.train.mkdir(parents=True)
    stopped.rundir.stop_file.touch()
    stopped.train()
    stopped.rundir.stop_file.unlink(missing_ok=True)
    codes, resumed = whole.forked.resume(stopped.rundir, stopped.planned)
    assert codes == [0, 0] and resumed is not None and resumed.step == 1, log(stopped.rundir)
    assert_same(merged(whole, "whole"), merged(stopped, "resumed"))


@ON_DEMAND
@pytest.mark.parametrize("case", COUNTED)
def test_the_plan_counts_the_tensors_of_a_rank(trainings: Trainings, tmp_path: Path, case: str) -> None:
    """The plan's count is that of all tensors that live after the last step, those of the reference among them.

    Batches and metrics are not worth counting.
    """
    rundir, (plan, run, cluster) = RunDir(tmp_path / "run"), trainings.plan(case)
    codes = trainings.forked(case).train(rundir, (plan, run, cluster), program="tests.rank_programs:count_tensors")
    assert codes == [0, 0], log(rundir)
    settings = resolve(run, cluster)
    scenario, buckets = scenario_of(settings, plan.choice), buckets_of(settings, plan.choice)
    expected = sum(states.resident(scenario, buckets).values()) + sum(host.offloaded(scenario, buckets).values())
    if scenario.spec.offload_param:
        expected += states.reference_bytes(scenario)
    live = [int(file.read_text()) for file in rundir.attempts.glob("*/live-*.txt")]
    assert live == [pytest.approx(expected, rel=0.02)] * 2


@ON_DEMAND
@pytest.mark.parametrize("case", [*EVERYWHERE, "dpo full zero3 precomputed"])
def test_after_out_of_memory_it_resumes_with_the_next_fallback(trainings: Trainings, case: str) -> None:
    """Torch's own error ends step 3 without gradient checkpointing; the driver resumes from step 2 with it."""
    forked, training = trainings.forked(case), trainings.plan(case)
    assert [fallback.choice.gradient_checkpointing for fallback in training[0].fallbacks][:1] == [True]
    forked.drive(training, "tests.rank_programs:train")
    checkout = forked.checkout
    ends = [(entry["end"], entry["fallback"]) for entry in checkout.read("train/attempts/index.json")]
    assert ends == [("GPU out of memory", 0), ("finished", 1)]
    assert checkout.read("train/attempts/002/attempt.json")["resume_from"].endswith("checkpoint-2")
    losses = {at: line["loss"] for at, line in enumerate(trainings.trl(case)[0], start=1)}
    assert checkout.losses() == pytest.approx(losses, abs=1e-5)
