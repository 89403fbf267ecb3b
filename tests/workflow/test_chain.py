"""A run that starts from another run's model: both are planned at once, and edits of the first rerun the second."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from shardmake.run.attempt import Attempt, AttemptDir
from shardmake.run.evaluation import EvaluationResult
from shardmake.run.paths import RunDir
from shardmake.run.sources import Sources
from tests.workflow.checkout import PROFILE, REPOSITORY, RUN, UNPUSHED, Checkout
from tests.workflow.objectives import write_examples
from tests.workflow.test_module import make_lab
from tests.workflow.test_reruns import finish

SFT: dict[str, Any] = UNPUSHED | {"strategy": "ddp"}
PAIRS: dict[str, Any] = {
    "objective": "dpo", "packing": False, "sequence_length": 128,
    "data": {"train": "examples.jsonl", "eval": "held_out.jsonl"},
}  # fmt: skip
TRAINING = ["plan", "render", "train", "consolidate"]
ENDS = ["evaluate", "report"]


def trained(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of trainings that take many minutes."""
    return pytest.mark.training(pytest.mark.objectives(pytest.mark.timeout(6000)(test)))


def configure(checkout: Checkout, sft: dict[str, Any], **runs: dict[str, Any]) -> None:
    checkout.write_config({"cluster": "config/cluster.yaml", "runs": {"sft": SFT | sft, **runs}})


MESSAGES = {
    "fetching the data": "fetch", "fetching the base": "fetch-weights", "estimating": "plan", "rendering": "render",
    "tokenizing": "data", "training": "train", "merging": "consolidate", "measuring": "evaluate", "putting": "report",
}  # fmt: skip
"""Each stage by the beginning of its message."""


def dry_run(checkout: Checkout, *words: str) -> dict[str, list[str]]:
    """Return the stages that would run, by run."""
    output = checkout("snakemake", *PROFILE, "-n", *words).stdout
    found: dict[str, list[str]] = {}
    for run, message in re.findall(r"^Job \d+: (\w+): (.*)$", output, re.M):
        found.setdefault(run, []).append(next(stage for start, stage in MESSAGES.items() if message.startswith(start)))
    return {run: sorted(stages) for run, stages in found.items()}


def test_edits_of_the_first_run_rerun_the_second(checkout: Checkout) -> None:
    write_examples("dpo", checkout.root, checkout.root / "resources/demo")
    dpo = {"base": "sft", "model": "run:sft", **PAIRS, "learning_rate": 1e-4, "evaluation": SFT["evaluation"]}
    configure(checkout, {}, dpo=dpo)
    planned = {"sft": ["fetch", "plan"], "dpo": ["fetch", "plan"]}
    assert dry_run(checkout, "plan") == planned, "no weights are needed, and none are trained"
    assert dry_run(checkout, "fetch")["dpo"] == ["fetch"]
    first = sorted(["fetch", "fetch-weights", "data", *TRAINING])
    assert dry_run(checkout, "runs/dpo/train/receipt.json")["sft"] == first, "neither evaluated nor reported"
    assert dry_run(checkout, "--until", "runs/dpo/train/receipt.json")["sft"] == first
    assert dry_run(checkout, "--until", "plan_run") == planned
    refused = checkout("snakemake", *PROFILE, "-n", "--until", "train_run", check=False).stdout
    assert "those of run:sft. Name the step as the target: snakemake train" in refused

    finish(checkout)
    assert dry_run(checkout) == {}
    again = sorted(["fetch-weights", *TRAINING[2:], *ENDS])
    configure(checkout, {"learning_rate": 1e-3}, dpo=dpo)
    assert dry_run(checkout) == {"sft": sorted([*TRAINING, *ENDS]), "dpo": again}
    configure(checkout, {"dtype": "bf16"}, dpo=dpo | {"dtype": "keep"})
    assert dry_run(checkout) == {"sft": sorted(["consolidate", *ENDS]), "dpo": again}
    configure(checkout, {"evaluation": {"max_new_tokens": 9}}, dpo=dpo)
    assert dry_run(checkout) == {"sft": ENDS}
    configure(checkout, {}, dpo=dpo | {"learning_rate": 1e-5})
    assert dry_run(checkout) == {"dpo": sorted([*TRAINING, *ENDS])}
    configure(checkout, {}, dpo=dpo)
    template = checkout.root / "resources/demo/base/tokenizer_config.json"
    template.write_text(template.read_text() + " ")
    stages = sorted([*first, *ENDS])
    assert dry_run(checkout) == {"sft": stages, "dpo": stages}, "both use this tokenizer"


def test_a_chain_in_another_workflow(tmp_path: Path, inputs: Path) -> None:
    lab = make_lab(tmp_path / "lab", inputs)
    config = yaml.safe_load((lab.root / "lab.yaml").read_text())
    config["training"]["runs"]["following"] = RUN | {"strategy": "ddp", "model": "run:demo"}
    (lab.root / "lab.yaml").write_text(yaml.safe_dump(config))
    output = lab("snakemake", "--cores", "1", "-n", "shardmake_report").stdout
    reasons = [line for line in output.splitlines() if "runs/following/" in line and "updated by another job" in line]
    assert any("tuned runs/runs/demo/sources.json" in line for line in reasons)
    assert any("tuned runs/runs/demo/model/receipt.json" in line for line in reasons)
    assert "shardmake.launch.worker" in output, "the dry run shows the submission, as without a module"
    lab("snakemake", "--cores", "1", "tuned runs/runs/following/sources.json")
    sources = Sources.read(RunDir(lab.root / "tuned runs/runs/following").sources)
    assert sources.model.path == "tuned runs/runs/following/fetched/model"
    assert (lab.root / sources.model.path / "tokenizer.json").exists()


@trained
def test_pairs_are_learned_from_the_model_that_conversations_made(checkout: Checkout) -> None:
    """LoRA, then full: the merged model of the first run is the base, the reference and the start of the second."""
    write_examples("dpo", checkout.root, checkout.root / "resources/demo")
    lora = {"method": "lora", "lora": {"rank": 8}}
    dpo = {key: value for key, value in SFT.items() if key != "checkpoints"} | PAIRS | {"model": "run:sft"}
    configure(checkout, lora, dpo=dpo)
    checkout("snakemake", *PROFILE)
    sft, following = RunDir(checkout.root / "runs/sft"), RunDir(checkout.root / "runs/dpo")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (sft.model, following.base_model))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert EvaluationResult.read(following.evaluation).tokens
    assert "base after the run sft" in following.report.read_text()
    untouched = following.train_receipt.read_bytes()
    checkout("snakemake", *PROFILE, "-f", "runs/sft/model/receipt.json")
    assert dry_run(checkout) == {}, "the same model again trains nothing"

    configure(checkout, lora | {"learning_rate": 1e-3}, dpo=dpo)
    checkout("snakemake", *PROFILE, "runs/sft/model/receipt.json")
    refused = checkout("shardmake", "train", "dpo", check=False).stdout
    assert "the model of run sft is not the one that runs/dpo/fetched/weights.json records" in refused
    checkout("snakemake", *PROFILE, "runs/dpo/model/receipt.json")
    assert following.train_receipt.read_bytes() != untouched
    last = Attempt.read(AttemptDir(following.attempts / "002").settings)
    assert last.resume_from is None, "a checkpoint that was trained from another model is not resumed"


@trained
def test_preferences_continue_the_adapter_that_conversations_made(checkout: Checkout) -> None:
    """One command plans both, trains both, and merges the adapter of the second; an edit of the first trains both."""
    write_examples("dpo", checkout.root, checkout.root / "resources/demo")
    lora = {"method": "lora", "lora": {"rank": 8}}
    dpo = {"base": "sft", **PAIRS, "lora": {"adapter": "run:sft"}, "dpo": {"reference": "precomputed"}}
    dpo["learning_rate"] = 1e-4
    configure(checkout, lora, dpo=dpo)
    assert dry_run(checkout, "plan") == {"sft": ["fetch", "plan"], "dpo": ["fetch", "plan"]}
    checkout("snakemake", *PROFILE)
    sft, following = RunDir(checkout.root / "runs/sft"), RunDir(checkout.root / "runs/dpo")
    last = max((sft.checkpoints).glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (following.adapter, last))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert json.loads(following.metrics.read_text().splitlines()[0])["rewards"]["chosen"] == pytest.approx(0, abs=1e-5)
    assert "continues the adapter run:sft" in following.report.read_text()
    assert "adapter: run:sft" in following.report.read_text()
    assert dry_run(checkout) == {}

    configure(checkout, lora | {"learning_rate": 1e-3}, dpo=dpo)
    again = sorted(["fetch-weights", *TRAINING[2:], *ENDS])
    assert dry_run(checkout) == {"sft": sorted([*TRAINING, *ENDS]), "dpo": again}
    checkout("snakemake", *PROFILE, "runs/sft/model/receipt.json")
    refused = checkout("shardmake", "train", "dpo", check=False).stdout
    assert "does not record the present adapter of run:sft" in refused


# --- the configurations of examples, as their first lines say how to run them: 24 minutes on two cores -----------------


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Checkout:
    """A checkout with the data of the examples, in which both examples share the first run."""
    checkout = Checkout.create(tmp_path_factory.mktemp("examples") / "checkout", inputs)
    shutil.copytree(REPOSITORY / "examples", checkout.root / "examples")
    checkout("shardmake", "demo", "--preferences")
    return checkout


@trained
def test_preferences_change_the_spelling_and_not_the_answer(examples: Checkout) -> None:
    examples("snakemake", *PROFILE, "--configfile", "examples/preferences.yaml")
    found = EvaluationResult.read(RunDir(examples.root / "runs/sbatch-preferred").evaluation)
    assert found.preferences is not None
    assert found.preferences.base_accuracy < 0.75, "conversations have both spellings"
    assert found.preferences.tuned_accuracy > 0.95 and found.preferences.rewards.accuracies > 0.95


@trained
def test_a_rule_is_learned_by_grpo(examples: Checkout) -> None:
    examples("snakemake", *PROFILE, "--configfile", "examples/grpo.yaml")
    rundir = RunDir(examples.root / "runs/sbatch-rewarded")
    states = rundir.checkpoints.glob("checkpoint-*/trainer_state.json")
    newest = max(states, key=lambda path: int(path.parent.name.partition("-")[2]))
    rewards = [line["reward"] for line in json.loads(newest.read_text())["log_history"] if "reward" in line]
    first, last = rewards[:5], rewards[-5:]
    assert sum(last) / 5 > sum(first) / 5 + 0.1
    found = EvaluationResult.read(rundir.evaluation)
    assert found.tuned.exact > found.base.exact + 0.1
