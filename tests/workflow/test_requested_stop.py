"""A stop that a person asked for reads as a stop in Snakemake's output, and does not count as done."""

import pytest

from shardmake.launch.watcher import WAITED_VARIABLE
from tests.workflow.checkout import PROFILE, Checkout


def test_snakemake_ends_with_the_line_that_says_how_to_resume(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout("snakemake", *PROFILE, "render", "data")
    (checkout.run / "train").mkdir()
    (checkout.run / "train/STOP").touch()
    monkeypatch.setenv(WAITED_VARIABLE, "1")  # a driver that waited for a slot obeys the file before it submits
    stopped = checkout("snakemake", *PROFILE, check=False)
    assert stopped.returncode == 1 and not (checkout.run / "model").exists()
    *_, last = stopped.stdout.rstrip().splitlines()
    assert last == "Training of demo stopped as requested. Run the same command again to resume."
    for noise in ("Error in rule", "RuleException", "WorkflowError", "Error:", "Look above"):
        assert noise not in stopped.stdout
    assert stopped.stdout.count("somebody created runs/demo/train/STOP. No job was submitted.") == 1
