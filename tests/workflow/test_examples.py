"""The configurations of config/examples, as their first lines say how to run them: minutes on two idle cores."""

from pathlib import Path

import pytest

from shardmake.run.evaluation import EvaluationResult
from shardmake.run.paths import RunDir
from tests.workflow.checkout import Checkout

pytestmark = [pytest.mark.training, pytest.mark.objectives]
TIMEOUT = 3000


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Checkout:
    """A checkout with the data of the examples."""
    checkout = Checkout.create(tmp_path_factory.mktemp("examples") / "checkout", inputs)
    checkout("shardmake", "demo", "--preferences")
    return checkout


@pytest.mark.timeout(2 * TIMEOUT)
def test_preferences_change_the_spelling_and_not_the_answer(examples: Checkout) -> None:
    run_example(examples, "preferences")
    found = EvaluationResult.read(RunDir(examples.root / "runs/sbatch-preferred").evaluation)
    assert found.preferences is not None
    assert found.preferences.base_accuracy < 0.75, "conversations have both spellings"
    assert found.preferences.tuned_accuracy > 0.95 and found.preferences.rewards.accuracies > 0.95


def run_example(checkout: Checkout, name: str) -> None:
    file = f"config/examples/{name}.yaml"
    checkout("snakemake", "--profile", "profiles/local", "--configfile", file, timeout=TIMEOUT)
