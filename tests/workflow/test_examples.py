"""The configurations of examples, as their first lines say how to run them: 24 minutes on two cores at a load of 22."""

import json
import shutil
from pathlib import Path

import pytest

from shardmake.run.evaluation import EvaluationResult
from shardmake.run.paths import RunDir
from tests.workflow.checkout import PROFILE, REPOSITORY, Checkout

pytestmark = [pytest.mark.training, pytest.mark.objectives, pytest.mark.timeout(6000)]


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Checkout:
    """A checkout with the data of the examples, in which both examples share the first run."""
    checkout = Checkout.create(tmp_path_factory.mktemp("examples") / "checkout", inputs)
    shutil.copytree(REPOSITORY / "examples", checkout.root / "examples")
    checkout("shardmake", "demo", "--preferences")
    return checkout


def test_preferences_change_the_spelling_and_not_the_answer(examples: Checkout) -> None:
    examples("snakemake", *PROFILE, "--configfile", "examples/preferences.yaml")
    found = EvaluationResult.read(RunDir(examples.root / "runs/sbatch-preferred").evaluation)
    assert found.preferences is not None
    assert found.preferences.base_accuracy < 0.75, "conversations have both spellings"
    assert found.preferences.tuned_accuracy > 0.95 and found.preferences.rewards.accuracies > 0.95


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
