"""A sweep with inheritance, from one file through Snakemake to the comparison of its runs."""

import json
import zipfile

import pytest

from tests.workflow.checkout import PROFILE, RUN, Checkout

pytestmark = [pytest.mark.training, pytest.mark.objectives]  # minutes, and test_chain.py trains several runs in CI
OWN = ("push", "learning_rate", "max_steps", "strategy", "evaluation")
DEFAULTS = {key: value for key, value in RUN.items() if key not in OWN} | {
    "data": {"train": "resources/demo/train.jsonl", "eval": "few.jsonl"},
    "evaluation": {"batch_tokens": 2048},
}


def test_two_runs_of_a_sweep_train_to_the_end_and_are_compared(checkout: Checkout) -> None:
    """The data are tokenized once, each run has its own settings, and the page has both runs."""
    checkout.configure({"processes_per_node": 1})
    examples = (checkout.root / "resources/demo/eval.jsonl").read_text().splitlines(keepends=True)
    (checkout.root / "few.jsonl").write_text("".join(examples[:8]))
    runs = {
        "common": {"max_steps": 2, "learning_rate": 1e-3, "strategy": "ddp"},
        "grid": {"base": "common", "sweep": {"learning_rate": [1e-3, 2e-3]}},
    }
    checkout.write_config({"cluster": "config/cluster.yaml", "defaults": DEFAULTS, "runs": runs})
    done = checkout("snakemake", *PROFILE, "compare/grid.html").stdout
    assert done.count("which has the same content.") == 1 and not (checkout.root / "runs/common").exists()
    names = ("grid-lr1e-3", "grid-lr2e-3")
    rates = {
        name: json.loads((checkout.root / f"runs/{name}/plan/training.json").read_text())["arguments"]["learning_rate"]
        for name in names
    }
    assert rates == {"grid-lr1e-3": 1e-3, "grid-lr2e-3": 2e-3}
    page = (checkout.root / "compare/grid.html").read_text()
    assert "<svg" in page and all(name in page for name in names)

    found = json.loads(checkout("shardmake", "--quiet", "compare", "--sweep", "grid", "--json").stdout)
    assert [run["settings"] for run in found["runs"]] == [{"learning_rate": "0.001"}, {"learning_rate": "0.002"}]
    assert all(run["results"]["steps"] == 2 and run["results"]["evaluation loss"] for run in found["runs"])
    assert found["notes"] == []

    checkout("snakemake", *PROFILE, "--report", "report.zip", "compare/grid.html")
    with zipfile.ZipFile(checkout.root / "report.zip") as report:
        assert any(name.endswith("grid.html") for name in report.namelist())
