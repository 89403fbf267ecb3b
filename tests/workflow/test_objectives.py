"""Every objective equals plain TRL on the same examples, resumes as if it had not stopped, and survives faults.

The final model is the one that TRL saves, and its evaluation has the scores that the training measured. Packed sequences
are in other tests: TRL packs them for kernels that need a GPU.
"""

import itertools
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from shardmake.config.models import Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.evaluate.stage import evaluate
from shardmake.memory import host, states
from shardmake.plan.planner import buckets_of, scenario_of
from shardmake.plan.resolve import resolve
from shardmake.run.model_class import ModelClass
from shardmake.run.paths import RunDir
from tests.workflow.forked import Forked, branch, log, metrics
from tests.workflow.objectives import OBJECTIVES, Row, Training, Trainings, settings_of
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
IN_CI = {
    ("dpo", "full", "ddp"), ("dpo", "lora", "ddp"), ("dpo", "full", "zero3"), ("dpo", "full", "fsdp"),
    ("kto", "full", "zero3"), ("reward", "full", "ddp"), ("dpo", "qlora", "zero2"),
}  # fmt: skip


def _cases() -> Iterator[tuple[str, str, str]]:
    for objective in OBJECTIVES:
        yield from ((objective, "full", name) for name in (REQUIRED if objective == "sft" else FULL))
        yield from ((objective, "lora", name) for name in LORA.get(objective, ()))
        if objective != "sft":
            yield from ((objective, "qlora", name) for name in ("ddp", "zero1", "zero2", "fsdp"))


CASES = [pytest.param(*case, marks=() if case in IN_CI else ON_DEMAND, id="-".join(case)) for case in _cases()]
PRECOMPUTED = [
    *(("dpo", "full", name) for name in FULL),
    *(("dpo", "lora", name) for name in LORA["dpo"]),
    *(("kto", "full", name) for name in ("ddp", "zero2", "zero3", "zero3-offload", "fsdp")),
    *(("kto", "lora", name) for name in ("ddp", "zero2", "fsdp")),
]
"""Cases of a reference that runs once before the first step."""
KILLED = [
    *(("sft", "full", name, "model") for name in REQUIRED),
    *((objective, "full", name, "model") for objective in ("dpo", "kto", "reward") for name in REQUIRED),
    *((objective, "lora", "fsdp", "model") for objective in ("dpo", "kto", "reward")),
    ("kto", "full", "zero2", "precomputed"),
    *((*case, "model") for case in [("dpo", "qlora", "fsdp"), ("kto", "qlora", "ddp"), ("reward", "qlora", "zero2")]),
]
STOPPED = [
    *((objective, "full", name) for objective in OBJECTIVES for name in REQUIRED),
    *(("dpo", "lora", "fsdp"), ("kto", "lora", "ddp"), ("reward", "lora", "fsdp")),
]


@pytest.mark.parametrize(("objective", "method", "strategy"), CASES)
def test_training_equals_plain_trl_and_resumes(
    trainings: Trainings, tmp_path: Path, objective: str, method: str, strategy: Strategy
) -> None:
    """Losses, gradient norms and scores of every step are TRL's; a second half from the checkpoint is the same."""
    rundir, training = RunDir(tmp_path / "run"), trainings.plan(objective, method, strategy)
    forked = trainings.forked(objective, method)
    assert forked.train(rundir, training) == [0, 0], log(rundir)
    assert_trained_as(objective, trainings.trl(objective, method), rundir, rounded=method == "qlora")
    assert_resumes(forked, rundir, training)
    if method == "full":
        assert_model_and_evaluation(objective, rundir, training, trainings.model(objective, method))
    if method == "qlora":
        assert_merges_as_peft(objective, forked, rundir, training[0].workload.model_class)


def assert_trained_as(objective: str, theirs: list[Row], rundir: RunDir, *, rounded: bool = False) -> None:
    """Check the metrics of each step against what TRL logs.

    With adapters on 4 bits, ours are in fp32 or have a master copy, and TRL's are ``rounded`` to bf16.
    """
    row = OBJECTIVES[objective]
    loss, norm, score, kl = (6e-3, 0.01, 0.02, math.inf) if rounded else (1e-5, 1e-3, 1e-4, 1e-3)
    trained = [line for line in metrics(rundir) if "loss" in line]
    assert len(theirs) == 4
    for line, expected in zip(trained, theirs, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], abs=loss)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=norm)
        assert sorted(line.get(row.scores, ())) == sorted(row.names)
        for name in row.names:
            assert line[row.scores][name] == pytest.approx(expected[row.theirs.format(name)], abs=score), name
        if objective == "kto":
            assert line["kl"] == pytest.approx(expected["kl"], abs=kl)
    evaluated = [sorted(line.get(f"eval_{row.scores}", ())) for line in metrics(rundir) if "eval_loss" in line]
    assert evaluated == [sorted(row.names)] * 2
    if rounded or objective == "sft":
        return
    first, *_, last = (line[row.scores].get("margins", line[row.scores].get("margin")) for line in trained)
    assert last > (first if objective != "kto" else 0)
    assert objective != "dpo" or first == 0
    assert objective != "kto" or max(line["kl"] for line in trained) > 0, trained


def assert_resumes(forked: Forked, rundir: RunDir, training: Training) -> RunDir:
    """Train the second half again from the checkpoint, compare every bit, and return the second training."""
    again = branch(rundir, rundir.root.with_name("again"))
    shutil.rmtree(again.checkpoints / "checkpoint-4")
    assert forked.train(again, training, resume_from=again.checkpoints / "checkpoint-2") == [0, 0], log(again)
    assert_same_weights(rundir, again, training)
    return again


def assert_same_weights(one: RunDir, other: RunDir, training: Training) -> None:
    """Compare every bit of the final models, or of the adapters alone."""
    whole, resumed = (merged(run, run.root.with_name(f"merged-{run.root.name}"), training) for run in (one, other))
    assert sorted(whole) == sorted(resumed)
    assert [name for name in whole if not whole[name].equal(resumed[name])] == []
    assert not any(".ref." in name for name in whole)


def merged(rundir: RunDir, out: Path, training: Training) -> dict[str, torch.Tensor]:
    """Return the weights of the final model by name; of adapters for a language model, those of the adapter alone."""
    plan, run, _ = training
    is_reward = run.objective == "reward" and run.method != "qlora"
    adapter = run.method != "full" and not is_reward
    kind = {"base": Path(run.model), "model_class": plan.workload.model_class} if is_reward else {}
    consolidate(rundir.checkpoints / "checkpoint-4", out, adapter=adapter, workers=1, **kind)
    if is_reward:
        config = json.loads((out / "config.json").read_text())
        assert config["architectures"] == ["LlamaForSequenceClassification"] and config["pad_token_id"] is not None
    return load_file(out / ("adapter_model.safetensors" if adapter else "model.safetensors"))


def assert_model_and_evaluation(objective: str, rundir: RunDir, training: Training, theirs: Path) -> None:
    """Check the weights against those that TRL saves, and the scores against those that training measured."""
    plan, run, _ = training
    kind = {"model_class": plan.workload.model_class} if objective == "reward" else {}
    consolidate(rundir.checkpoints / "checkpoint-4", rundir.model, base=Path(run.model), workers=1, **kind)
    found, expected = (load_file(folder / "model.safetensors") for folder in (rundir.model, theirs))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    if objective == "sft":
        return
    plan.write(rundir.plan)
    result, measured = evaluate(run, rundir), metrics(rundir)[-1][f"eval_{OBJECTIVES[objective].scores}"]
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


def assert_merges_as_peft(objective: str, forked: Forked, rundir: RunDir, model_class: ModelClass) -> None:
    """Compare the merged model with the base model in 32 bits to which PEFT adds the trained adapter."""
    base, last = forked.checkout.root / "resources/demo/base", rundir.checkpoints / "checkpoint-4"
    consolidate(last, rundir.model, base=base, model_class=model_class, workers=1)
    kind = AutoModelForSequenceClassification if objective == "reward" else AutoModelForCausalLM
    loaded = kind.from_pretrained(base, dtype=torch.float32, **({"num_labels": 1} if objective == "reward" else {}))
    expected = PeftModel.from_pretrained(loaded, rundir.root.with_name("merged-run")).merge_and_unload().state_dict()
    found = load_file(rundir.model / "model.safetensors")
    assert "score.weight" in found if objective == "reward" else any("q_proj" in name for name in found)
    torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("objective", "method", "strategy"),
    [pytest.param(*case, marks=() if case == ("dpo", "full", "fsdp") else ON_DEMAND) for case in PRECOMPUTED],
)
def test_a_precomputed_reference_trains_as_plain_trl(
    trainings: Trainings, tmp_path: Path, objective: str, method: str, strategy: Strategy
) -> None:
    """TRL runs the reference of DPO in every step; a training that resumes reads the log-probabilities of the first."""
    rundir, training = RunDir(tmp_path / "run"), trainings.plan(objective, method, strategy, "precomputed")
    forked = trainings.forked(objective, method)
    assert forked.train(rundir, training) == [0, 0], log(rundir)
    theirs = trainings.trl(objective, method if objective == "dpo" else f"{method}-precomputed")
    assert_trained_as(objective, theirs, rundir)
    (file,) = rundir.train.glob("reference-*.safetensors")
    if objective == "dpo":
        shapes = {name: tuple(values.shape) for name, values in load_file(file).items()}
        assert shapes == {"train": (48, 2), "eval": (12, 2)}
    again = assert_resumes(forked, rundir, training)
    assert (again.train / file.name).stat().st_mtime_ns == file.stat().st_mtime_ns
    assert metrics(again)[-1]["eval_rewards"] == metrics(rundir)[-1]["eval_rewards"]


@ON_DEMAND
@pytest.mark.parametrize("strategy", REQUIRED)
def test_precomputed_log_probabilities_keep_their_precision_in_bf16(
    trainings: Trainings, tmp_path: Path, strategy: Strategy
) -> None:
    """Before the first update the model is the reference. Rounded to bf16, a log-probability would be off by 0.5."""
    given = trainings.forked("dpo", "full")
    rundir, forked = RunDir(tmp_path / "run"), Forked(given.checkout, given.server)  # whose launcher has bf16
    training = forked.plan(strategy, 2, **settings_of("dpo", "full", "precomputed"), precision="bf16")
    assert forked.train(rundir, training) == [0, 0], log(rundir)
    first = metrics(rundir)[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards"]["chosen"] == first["rewards"]["rejected"] == 0


@ON_DEMAND
@pytest.mark.parametrize(("objective", "method", "strategy", "reference"), KILLED)
def test_killed_in_a_save_it_resumes_bit_for_bit(
    trainings: Trainings, tmp_path: Path, objective: str, method: str, strategy: Strategy, reference: str
) -> None:
    """Rank 0 is killed halfway through a file of states, and before the rename that commits the checkpoint."""
    settings = settings_of(objective, method, reference)
    sweep = Sweep(trainings.forked(objective, method), tmp_path, strategy, victim=0, settings=settings)
    sweep.prepare()
    halves = [(at, mode) for at, mode, what in sweep.points if mode == "half" and "shardmake.json" not in what]
    moved = [(at, mode) for at, mode, what in sweep.points if what == "os.rename /.saving/002/checkpoint-4"]
    chosen = [halves[len(halves) // 2], *moved]
    assert len(chosen) == 2, sweep.points
    for at, mode in chosen:
        found = sweep.survive(at, mode)
        assert found["recovered"], (at, mode, found)


@ON_DEMAND
@pytest.mark.parametrize(("objective", "method", "strategy"), STOPPED)
def test_a_stop_file_saves_and_training_resumes_bit_for_bit(
    trainings: Trainings, tmp_path: Path, objective: str, method: str, strategy: Strategy
) -> None:
    """Stop a training after its first step, resume it, and compare every bit with one that did not stop."""
    forked, training = trainings.forked(objective, method), trainings.plan(objective, method, strategy)
    whole, stopped = RunDir(tmp_path / "whole"), RunDir(tmp_path / "stopped")
    assert forked.train(whole, training) == [0, 0], log(whole)
    stopped.train.mkdir(parents=True)
    stopped.stop_file.touch()
    assert forked.train(stopped, training) == [0, 0], log(stopped)
    stopped.stop_file.unlink(missing_ok=True)
    codes, resumed = forked.resume(stopped, training)
    assert codes == [0, 0] and resumed is not None and resumed.step == 1, log(stopped)
    assert_same_weights(whole, stopped, training)


@ON_DEMAND
@pytest.mark.parametrize(
    ("objective", "strategy", "reference"),
    [
        *(("dpo", name, "model") for name in ("zero2", "zero3", "zero3-offload")),
        *(("kto", "zero2", "precomputed"), ("kto", "zero2", "model"), ("kto", "zero3", "model")),
        *(("reward", name, "model") for name in ("zero2", "zero3")),
    ],
)
def test_the_plan_counts_the_tensors_of_a_rank(
    trainings: Trainings, tmp_path: Path, objective: str, strategy: Strategy, reference: str
) -> None:
    """The plan's count is that of all tensors that live after the last step, those of the reference among them.

    Batches and metrics are not worth counting.
    """
    rundir, training = RunDir(tmp_path / "run"), trainings.plan(objective, "full", strategy, reference)
    plan, run, cluster = training
    codes = trainings.forked(objective, "full").train(rundir, training, program="tests.live_tensors:train")
    assert codes == [0, 0], log(rundir)
    settings = resolve(run, cluster)
    scenario, buckets = scenario_of(settings, plan.choice), buckets_of(settings, plan.choice)
    expected = sum(states.resident(scenario, buckets).values()) + sum(host.offloaded(scenario, buckets).values())
    if scenario.offloads_parameters:
        expected += states.reference_bytes(scenario)
    live = [int(file.read_text()) for file in rundir.attempts.glob("*/live-*.txt")]
    assert live == [pytest.approx(expected, rel=0.02)] * 2


@ON_DEMAND
@pytest.mark.parametrize(
    ("objective", "strategy", "reference"),
    [*((*pair, "model") for pair in itertools.product(OBJECTIVES, REQUIRED)), ("dpo", "zero3", "precomputed")],
)
def test_after_out_of_memory_it_resumes_with_the_next_fallback(
    trainings: Trainings, objective: str, strategy: Strategy, reference: str
) -> None:
    """Torch's own error ends step 3 without gradient checkpointing; the driver resumes from step 2 with it."""
    forked, training = trainings.forked(objective, "full"), trainings.plan(objective, "full", strategy, reference)
    assert [fallback.choice.gradient_checkpointing for fallback in training[0].fallbacks][:1] == [True]
    forked.drive(training, "tests.out_of_memory:train")
    checkout = forked.checkout
    ends = [(entry["end"], entry["fallback"]) for entry in checkout.read("train/attempts/index.json")]
    assert ends == [("GPU out of memory", 0), ("finished", 1)]
    assert checkout.read("train/attempts/002/attempt.json")["resume_from"].endswith("checkpoint-2")
    losses = {at: line["loss"] for at, line in enumerate(trainings.trl(objective, "full"), start=1)}
    assert checkout.losses() == pytest.approx(losses, abs=1e-5)
