"""Training on preferences equals plain TRL on the same pairs, and resumes as if it had not stopped.

The final model is the one that TRL saves, and its evaluation has the rewards that the training measured.
"""

import json
import math
import os
import shutil
import subprocess
import sys
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
from shardmake.memory import host, states
from shardmake.plan.planner import buckets_of, scenario_of
from shardmake.plan.resolve import resolve
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from tests.fork_server import free_port
from tests.workflow.checkout import Checkout
from tests.workflow.forked import Forked, branch, log
from tests.workflow.sweep import Sweep

pytestmark = pytest.mark.training
SCRIPT = Path(__file__).with_name("scripts") / "trl_dpo.py"
SETTINGS: dict[str, Any] = {
    "objective": "dpo",
    "packing": False,
    "data": {"train": "pairs.jsonl", "eval": "held_out.jsonl", "order": "given"},
    "sequence_length": 128,
    "micro_batch_size": 3,
    "max_steps": 4,
    "epochs": None,
    "learning_rate": 2e-3,
    "warmup_ratio": 0.25,
    "checkpoints": {"every_steps": 2},
    "eval_every_steps": 2,
}


CASES = [("full", "ddp"), ("lora", "ddp"), ("full", "zero3"), ("full", "fsdp")]
OTHERS = [
    *(
        ("full", name)
        for name in ("zero1", "zero2", "zero1-offload", "zero2-offload", "zero3-offload-optimizer", "zero3-offload")
    ),
    *(("full", name) for name in ("fsdp-grad-op", "fsdp-offload")),
    *(("lora", name) for name in ("zero1", "zero2", "zero2-offload", "zero3", "zero3-offload", "fsdp", "fsdp-offload")),
]
ON_DEMAND = pytest.mark.objectives


@pytest.fixture(scope="module")
def pairs(forked: Forked, tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Forked:
    return with_pairs(forked, tmp_path_factory.mktemp("pairs") / "checkout", inputs, SETTINGS)


def with_pairs(forked: Forked, folder: Path, inputs: Path, settings: dict[str, Any]) -> Forked:
    """Return a checkout with pairs: the answer of a conversation, and its words in reversed order."""
    checkout = Checkout.create(folder, inputs)
    messages = [json.loads(line)["messages"] for line in (inputs / "train.jsonl").read_text().splitlines()[:60]]
    lines = [json.dumps(_pair(question, answer)) for question, answer in messages]
    (checkout.root / "pairs.jsonl").write_text("\n".join(lines[:48]))
    (checkout.root / "held_out.jsonl").write_text("\n".join(lines[48:]))
    checkout.configure({"processes_per_node": 2}, strategy="ddp", nodes=1, global_batch_size=12, **settings)
    checkout("shardmake", "data", "demo")
    return Forked(checkout, forked.server)


@pytest.fixture(scope="module")
def trl_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what TRL alone writes."""
    return tmp_path_factory.mktemp("trl")


@pytest.fixture(scope="module")
def plain(pairs: Forked, trl_models: Path) -> Callable[[str], list[dict[str, Any]]]:
    """Return what TRL alone logs at each step under DDP, by method."""
    return cache(lambda method: plain_trl(SCRIPT, pairs.checkout.root, "pairs.jsonl", method, trl_models))


def _pair(question: dict[str, str], answer: dict[str, str]) -> dict[str, Any]:
    worse = " ".join(reversed(answer["content"].split()))
    return {"prompt": [question], "chosen": [answer], "rejected": [{"role": "assistant", "content": f"No: {worse}"}]}


def planned(
    pairs: Forked, method: str, strategy: Strategy, reference: str = "model", **changes: Any
) -> tuple[Plan, Run, Cluster]:
    return pairs.plan(strategy, 2, method=method, dpo={"reference": reference}, **SETTINGS | changes)


@pytest.mark.parametrize(("method", "strategy"), [*CASES, *(pytest.param(*case, marks=ON_DEMAND) for case in OTHERS)])
def test_dpo_equals_plain_trl_and_resumes(
    pairs: Forked, tmp_path: Path, method: str, strategy: Strategy, plain: Callable[[str], list[dict[str, Any]]]
) -> None:
    """Losses, gradient norms and rewards of every step are TRL's; a second half from the checkpoint is the same."""
    rundir, training = RunDir(tmp_path / "run"), planned(pairs, method, strategy)
    assert pairs.train(rundir, training) == [0, 0], log(rundir)
    assert_trained_as(plain(method), rundir)
    assert_resumes(pairs, rundir, training, method)


def assert_trained_as(theirs: list[dict[str, Any]], rundir: RunDir) -> None:
    """Check the metrics of each step against what TRL logs."""
    ours = metrics(rundir)
    assert len(theirs) == 4
    trained = [line for line in ours if "loss" in line]
    for line, expected in zip(trained, theirs, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        for name, value in line["rewards"].items():
            assert value == pytest.approx(expected[f"rewards/{name}"], abs=1e-4), name
    assert trained[-1]["rewards"]["margins"] > trained[0]["rewards"]["margins"] == 0
    assert [sorted(line["eval_rewards"]) for line in ours if "eval_loss" in line] == [
        ["accuracies", "chosen", "margins", "rejected"]
    ] * 2


def assert_resumes(pairs: Forked, rundir: RunDir, training: tuple[Plan, Run, Cluster], method: str) -> RunDir:
    """Train the second half again from the checkpoint, compare every bit, and return the second training."""
    again = branch(rundir, rundir.root.with_name("again"))
    shutil.rmtree(again.checkpoints / "checkpoint-4")
    assert pairs.train(again, training, resume_from=again.checkpoints / "checkpoint-2") == [0, 0], log(again)
    whole, resumed = (merged(run, run.root.with_name(f"merged-{run.root.name}"), method) for run in (rundir, again))
    assert sorted(whole) == sorted(resumed)
    assert [name for name in whole if not whole[name].equal(resumed[name])] == []
    assert not any(".ref." in name for name in whole)
    return again


IN_CI = ("full", "fsdp")
PRECOMPUTED = [IN_CI, *(pytest.param(*case, marks=ON_DEMAND) for case in [*CASES, *OTHERS] if case != IN_CI)]
"""Cases of a reference that runs once before the first step."""


@pytest.mark.parametrize(("method", "strategy"), PRECOMPUTED)
def test_a_precomputed_reference_trains_as_plain_trl(
    pairs: Forked, tmp_path: Path, method: str, strategy: Strategy, plain: Callable[[str], list[dict[str, Any]]]
) -> None:
    """TRL runs the reference in every step here; a training that resumes reads the log-probabilities of the first."""
    rundir, training = RunDir(tmp_path / "run"), planned(pairs, method, strategy, reference="precomputed")
    assert pairs.train(rundir, training) == [0, 0], log(rundir)
    assert_trained_as(plain(method), rundir)
    (file,) = rundir.train.glob("reference-*.safetensors")
    assert {name: tuple(values.shape) for name, values in load_file(file).items()} == {
        "train": (48, 2),
        "eval": (12, 2),
    }
    again = assert_resumes(pairs, rundir, training, method)
    assert (again.train / file.name).stat().st_mtime_ns == file.stat().st_mtime_ns
    assert metrics(again)[-1]["eval_rewards"] == metrics(rundir)[-1]["eval_rewards"]


@pytest.mark.objectives
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp"])
def test_precomputed_log_probabilities_keep_their_precision_in_bf16(
    pairs: Forked, tmp_path: Path, strategy: Strategy
) -> None:
    """Before the first update the model is the reference. Rounded to bf16, a log-probability would be off by 0.5."""
    rundir, pairs = RunDir(tmp_path / "run"), Forked(pairs.checkout, pairs.server)  # whose launcher has bf16
    training = planned(pairs, "full", strategy, reference="precomputed", precision="bf16")
    assert pairs.train(rundir, training) == [0, 0], log(rundir)
    first = metrics(rundir)[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards"]["chosen"] == first["rewards"]["rejected"] == 0


EVALUATED = [("full", "ddp"), *(pytest.param("full", name, marks=ON_DEMAND) for name in ("zero3", "fsdp"))]


@pytest.mark.parametrize(("method", "strategy"), EVALUATED)
def test_the_final_model_is_that_of_trl_and_has_the_rewards_of_the_training(
    pairs: Forked,
    tmp_path: Path,
    method: str,
    strategy: Strategy,
    plain: Callable[[str], list[dict[str, Any]]],
    trl_models: Path,
) -> None:
    rundir = RunDir(tmp_path / "run")
    plan, run, cluster = planned(pairs, method, strategy)
    assert pairs.train(rundir, (plan, run, cluster)) == [0, 0], log(rundir)
    plain(method)
    consolidate(rundir.checkpoints / "checkpoint-4", rundir.model, base=Path(run.model), workers=1)
    ours, theirs = (
        load_file(folder / "model.safetensors") for folder in (rundir.model, trl_models / f"{method}.json.model")
    )
    assert sorted(ours) == sorted(theirs)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-5, msg=name)

    plan.write(rundir.plan)
    measured = metrics(rundir)[-1]["eval_rewards"]
    preferences = evaluate(run, rundir).preferences
    assert preferences is not None and preferences.pairs == 12
    for name, value in preferences.rewards:
        assert value == pytest.approx(measured[name], abs=1e-4), name


KILLED = [("full", "ddp"), ("full", "zero2"), ("full", "zero3"), ("full", "fsdp"), ("lora", "fsdp")]


@pytest.mark.objectives
@pytest.mark.parametrize(("method", "strategy"), KILLED)
def test_killed_in_a_save_dpo_resumes_bit_for_bit(
    pairs: Forked, tmp_path: Path, method: str, strategy: Strategy
) -> None:
    """Rank 0 is killed halfway through a file of states, and before the rename that commits the checkpoint."""
    assert_killed_training_recovers(Sweep(pairs, tmp_path, strategy, victim=0, settings=SETTINGS | {"method": method}))


def assert_killed_training_recovers(sweep: Sweep) -> None:
    """Kill a rank halfway through a file of states, and before the checkpoint's commit; compare the results."""
    sweep.prepare()
    halves = [(at, mode) for at, mode, what in sweep.points if mode == "half" and "shardmake.json" not in what]
    moved = [(at, mode) for at, mode, what in sweep.points if what == "os.rename /.saving/checkpoint-4"]
    chosen = [halves[len(halves) // 2], *moved]
    assert len(chosen) == 2, sweep.points
    for at, mode in chosen:
        found = sweep.survive(at, mode)
        assert found["recovered"], (at, mode, found)


REQUIRED: tuple[Strategy, ...] = ("ddp", "zero2", "zero3", "fsdp")
"""Strategies under which every objective has a test of a stop file and of a fallback."""


@pytest.mark.objectives
@pytest.mark.parametrize(("method", "strategy"), [*(("full", name) for name in REQUIRED), ("lora", "fsdp")])
def test_a_stop_file_saves_dpo_and_training_resumes_bit_for_bit(
    pairs: Forked, tmp_path: Path, method: str, strategy: Strategy
) -> None:
    assert_stopped_training_resumes(pairs, tmp_path, planned(pairs, method, strategy), method)


def assert_stopped_training_resumes(
    pairs: Forked, tmp_path: Path, training: tuple[Plan, Run, Cluster], method: str
) -> None:
    """Stop a training after its first step, resume it, and compare every bit with one that did not stop."""
    whole, stopped = RunDir(tmp_path / "whole"), RunDir(tmp_path / "stopped")
    assert pairs.train(whole, training) == [0, 0], log(whole)
    stopped.train.mkdir(parents=True)
    stopped.stop_file.touch()
    assert pairs.train(stopped, training) == [0, 0], log(stopped)
    stopped.stop_file.unlink(missing_ok=True)
    codes, resumed = pairs.resume(stopped, training)
    assert codes == [0, 0] and resumed is not None and resumed.step == 1, log(stopped)
    expected, found = (merged(run, tmp_path / f"merged-{run.root.name}", method) for run in (whole, stopped))
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if not expected[name].equal(found[name])] == []


@pytest.mark.objectives
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "zero3-offload"])
def test_the_plan_counts_the_tensors_of_a_rank(pairs: Forked, tmp_path: Path, strategy: Strategy) -> None:
    assert_counts_tensors(pairs, RunDir(tmp_path / "run"), planned(pairs, "full", strategy))


def assert_counts_tensors(checkout: Forked, rundir: RunDir, training: tuple[Plan, Run, Cluster]) -> None:
    """Compare the plan's count with all tensors that live after the last step, those of the reference among them.

    Batches and metrics are not worth counting.
    """
    plan, run, cluster = training
    assert checkout.train(rundir, training, program="tests.live_tensors:train") == [0, 0], log(rundir)
    settings = resolve(run, cluster)
    scenario, buckets = scenario_of(settings, plan.choice), buckets_of(settings, plan.choice)
    expected = sum(states.resident(scenario, buckets).values()) + sum(host.offloaded(scenario, buckets).values())
    if scenario.offloads_parameters:
        expected += states.reference_bytes(scenario)
    live = [int(file.read_text()) for file in rundir.attempts.glob("*/live-*.txt")]
    assert live == [pytest.approx(expected, rel=0.02)] * 2


@pytest.mark.objectives
@pytest.mark.parametrize(("strategy", "reference"), [*((name, "model") for name in REQUIRED), ("zero3", "precomputed")])
def test_after_out_of_memory_dpo_resumes_with_the_next_fallback(
    pairs: Forked, plain: Callable[[str], list[dict[str, Any]]], strategy: Strategy, reference: str
) -> None:
    """All four losses are those of plain TRL."""
    assert_fallback_after_out_of_memory(pairs, planned(pairs, "full", strategy, reference), plain("full"))


def assert_fallback_after_out_of_memory(
    forked: Forked, training: tuple[Plan, Run, Cluster], theirs: list[dict[str, Any]]
) -> None:
    """Let torch's own error end step 3 without gradient checkpointing; the driver resumes from step 2 with it."""
    assert [fallback.choice.gradient_checkpointing for fallback in training[0].fallbacks][:1] == [True]
    forked.drive(training, "tests.out_of_memory:train")
    checkout = forked.checkout
    ends = [(entry["end"], entry["fallback"]) for entry in checkout.read("train/attempts/index.json")]
    assert ends == [("GPU out of memory", 0), ("finished", 1)]
    assert checkout.read("train/attempts/002/attempt.json")["resume_from"].endswith("checkpoint-2")
    assert checkout.losses() == pytest.approx({at: line["loss"] for at, line in enumerate(theirs, start=1)}, abs=1e-5)


def merged(rundir: RunDir, out: Path, method: str) -> dict[str, torch.Tensor]:
    """Return the weights of the final model, or of the adapter alone, by name."""
    consolidate(rundir.checkpoints / "checkpoint-4", out, adapter=method == "lora", workers=1)
    return load_file(out / ("adapter_model.safetensors" if method == "lora" else "model.safetensors"))


def metrics(rundir: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rundir.metrics.read_text().splitlines()]


def plain_trl(script: Path, checkout: Path, data: str, method: str, folder: Path, *paths: Path) -> list[dict[str, Any]]:
    """Return what TRL alone logs at each step; the model is in ``folder`` then. Modules may lie in ``paths``."""
    out = folder / f"{method}.json"
    words = [script, checkout / "resources/demo/base", checkout / data, method, out]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(out.parent / "hf")}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    subprocess.run([*launcher, *map(str, words)], check=True, env=environment)
    return [line for line in json.loads(out.read_text()) if "loss" in line]
