"""Objectives of training as rows: their examples, settings and scores, and what plain TRL makes of the same examples."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from shardmake.run.paths import RunDir
from tests.fork_server import REPOSITORY, free_port
from tests.workflow.conftest import PACKAGES
from tests.workflow.forked import Forked, Planned, Trained

SCRIPT = Path(__file__).with_name("scripts") / "trl_alone.py"
Turn = dict[str, str]
Row = dict[str, Any]


@dataclass(frozen=True)
class Objective:
    """The differences between the tests of two objectives."""

    example: Callable[[int, Turn, Turn], Row]
    """Make an example of a number, a question and its answer."""
    settings: Row = field(default_factory=dict)
    scores: str = ""
    """Key of the scores in the metrics of a step; in those of an evaluation, "eval_" stands before it."""
    names: tuple[str, ...] = ()
    """The scores of a step, and of an evaluation."""
    theirs: str = "{}"
    """TRL's name for a score."""


def _worse(answer: Turn) -> Turn:
    return {"role": "assistant", "content": "No: " + " ".join(reversed(answer["content"].split()))}


def _pair(_: int, question: Turn, answer: Turn) -> Row:
    return {"prompt": [question], "chosen": [answer], "rejected": [_worse(answer)]}


def _labelled(number: int, question: Turn, answer: Turn) -> Row:
    good = number % 2 == 0
    return {"prompt": [question], "completion": [answer if good else _worse(answer)], "label": good}


_REWARDS = ("chosen", "margins", "rejected")
_SCORES = ("accuracy", "margin", "min_reward", "mean_reward", "max_reward")
OBJECTIVES = {
    "sft": Objective(lambda _, question, answer: {"prompt": [question], "completion": [answer]}),
    "dpo": Objective(_pair, scores="rewards", names=("accuracies", *_REWARDS), theirs="rewards/{}"),
    "kto": Objective(_labelled, {"kto": {"desirable_weight": 3.0}}, scores="rewards", names=_REWARDS, theirs="rewards/{}"),
    "reward": Objective(
        _pair, {"reward": {"center_rewards_coefficient": 0.01}, "evaluation": {"batch_tokens": 2048}},
        scores="reward_scores", names=_SCORES,
    ),
}  # fmt: skip
SETTINGS: Row = {
    "packing": False, "data": {"train": "examples.jsonl", "eval": "held_out.jsonl", "order": "given"},
    "sequence_length": 128, "micro_batch_size": 3, "max_steps": 4, "epochs": None, "learning_rate": 2e-3,
    "warmup_ratio": 0.25, "checkpoints": {"every_steps": 2}, "eval_every_steps": 2,
}  # fmt: skip


def settings_of(objective: str, method: str = "full", reference: str = "model") -> Row:
    own = OBJECTIVES[objective].settings | SETTINGS | {"objective": objective, "method": method}
    if method == "qlora":
        own |= {"precision": "bf16"}
    if objective in ("dpo", "kto"):
        own[objective] = {**own.get(objective, {}), "reference": reference}
    return own


@dataclass(frozen=True)
class Trainings:
    """Checkouts with the examples of each objective, and what plain TRL logs and saves with them.

    A case is text, such as ``dpo lora zero3`` or ``dpo full zero3 precomputed``: objective, method, strategy, reference.
    """

    checkout: Callable[[str, bool], Forked]
    folder: Path

    def forked(self, case: str) -> Forked:
        """Return the checkout of a case; a base in 4 bits has other libraries."""
        objective, method, *_ = case.split()
        return self.checkout(objective, method == "qlora")

    def plan(self, case: str) -> Planned:
        objective, method, strategy, *reference = case.split()
        return self.forked(case).plan(strategy, 2, **settings_of(objective, method, *reference))

    def train(self, folder: Path, case: str) -> Trained:
        return Trained(self.forked(case), RunDir(folder / "run"), self.plan(case)).train()

    def trl(self, case: str) -> tuple[list[Row], Path]:
        """Return what TRL alone logs at each step under DDP, and the folder of the model that it saves."""
        objective, method, _, *reference = case.split()
        if reference and objective == "kto":
            method += "-precomputed"
        out = self.folder / f"{objective}-{method}.json"
        if not out.exists():
            root = self.forked(case).checkout.root
            words = [SCRIPT, objective, root / "resources/demo/base", root / "examples.jsonl", method, out]
            run_with_two_ranks(words, out.parent, (REPOSITORY, PACKAGES) if method == "qlora" else ())
        return [line for line in json.loads(out.read_text()) if "loss" in line], Path(f"{out}.model")


def run_with_two_ranks(words: list[Any], folder: Path, paths: tuple[Path, ...] = ()) -> None:
    """Run a script with its arguments under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    subprocess.run([*launcher, *map(str, words)], check=True, env=environment)


def write_examples(objective: str, root: Path, inputs: Path) -> None:
    """Write 48 examples of the demo's conversations to ``root``, and 12 to evaluate."""
    messages = [json.loads(line)["messages"] for line in (inputs / "train.jsonl").read_text().splitlines()[:60]]
    lines = [json.dumps(OBJECTIVES[objective].example(number, *turns)) for number, turns in enumerate(messages)]
    (root / "examples.jsonl").write_text("\n".join(lines[:48]))
    (root / "held_out.jsonl").write_text("\n".join(lines[48:]))


def with_examples(objective: str, forked: Forked, inputs: Path) -> Forked:
    """Give the checkout 48 examples, and 12 to evaluate; the base of a reward model gets a head of its own."""
    root = forked.checkout.root
    write_examples(objective, root, inputs)
    settings = settings_of(objective, "full" if objective == "sft" else "lora")
    forked.checkout.configure({"processes_per_node": 2}, strategy="ddp", nodes=1, global_batch_size=12, **settings)
    forked.checkout("shardmake", "data", "demo")
    if objective == "reward":
        _untie(root / "resources/demo/base")
    return forked


def _untie(base: Path) -> None:
    config, weights = json.loads((base / "config.json").read_text()), load_file(base / "model.safetensors")
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    head = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, base / "model.safetensors", metadata={"format": "pt"})
