"""`--configfile` and `--config` of Snakemake reach the stages as Snakemake merged them, and rerun only what they change."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardmake.config.invocation import VARIABLE
from tests.workflow.checkout import LOCAL, PROFILE, RUN, Checkout

TARGET = "runs/mine/plan/training.json"


@pytest.fixture
def outside(tmp_path: Path, checkout: Checkout) -> Path:
    """A configuration and a cluster file outside the checkout, whose own configuration has a run and settings of others."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "one.yaml").write_text(yaml.safe_dump(LOCAL | {"processes_per_node": 1}))
    write(folder / "mine.yaml", learning_rate=9e-4)
    assert checkout.root not in folder.parents
    return folder


def write(path: Path, **changes: Any) -> Path:
    run = RUN | {"strategy": "zero2"} | changes
    path.write_text(yaml.safe_dump({"cluster": str(path.parent / "one.yaml"), "runs": {"mine": run}}))
    return path


def snakemake(checkout: Checkout, *options: str) -> str:
    return checkout("snakemake", *PROFILE, TARGET, *options).stdout


def settings(checkout: Checkout) -> tuple[float, int]:
    """Learning rate and seed of the rendered training."""
    arguments = json.loads((checkout.root / TARGET).read_text())["arguments"]
    return arguments["learning_rate"], arguments["seed"]


def test_overrides_reach_every_stage(checkout: Checkout, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files outside the clone, several files, single values, and the same settings under another name."""
    mine, extra = outside / "mine.yaml", outside / "extra.yaml"
    # Snakemake reads the prompt as 43200.
    extra.write_text("runs: {mine: {learning_rate: 7.0e-4, seed: 7, evaluation: {prompts: [12:00:00]}}}")
    several = ("--configfile", str(mine), str(extra), "--config", "runs={mine: {learning_rate: 5.0e-4}}")
    assert "demo:" not in snakemake(checkout, *several), "the configuration of the clone is not merged in"
    assert settings(checkout) == (5e-4, 7)
    plan = json.loads((checkout.root / "runs/mine/plan/plan.json").read_text())
    assert plan["choice"]["processes_per_node"] == 1, "the cluster file is mine"

    assert "Nothing to be done" in snakemake(checkout, *several)
    equal = write(outside / "equal.yaml", learning_rate=5e-4, seed=7, evaluation={"prompts": ["12:00:00"]})
    assert "Nothing to be done" in snakemake(checkout, "--configfile", str(equal))

    # A job of another invocation starts Snakemake again, after a file was damaged while it was in the queue.
    snakemake(checkout, "-n", "--configfile", str(mine))
    merged = sorted((checkout.root / ".snakemake/shardmake").glob("*.yaml"))
    copies = {yaml.safe_load(path.read_text())["runs"]["mine"]["learning_rate"]: path for path in merged}
    assert set(copies) == {5e-4, 9e-4}
    monkeypatch.setenv(VARIABLE, str(copies[9e-4]))
    (checkout.root / "config/config.yaml").write_text("cluster: [\n")
    checkout("snakemake", TARGET, "--mode", "subprocess", "--nolock", "--cores", "1", "--forceall")
    assert settings(checkout) == (9e-4, 42)


def test_values_on_the_command_line_override_the_configuration_of_the_clone(checkout: Checkout) -> None:
    values = "runs={demo: {learning_rate: 5.0e-4, max_steps: 5, push: null}}"
    checkout("snakemake", *PROFILE, "runs/demo/plan/training.json", "--config", values)
    arguments = checkout.read("plan/training.json")["arguments"]
    assert (arguments["learning_rate"], arguments["max_steps"]) == (5e-4, 5)


@pytest.mark.parametrize(("executor", "profile"), [("local", "slurm"), ("slurm", "profiles/local")])
def test_a_profile_that_contradicts_the_cluster_file_is_rejected(
    checkout: Checkout, executor: str, profile: str
) -> None:
    checkout.configure({"executor": executor})
    done = checkout("snakemake", "-n", "--profile", profile, check=False)
    assert done.returncode == 1
    assert f"Error: cluster: config/cluster.yaml has `executor: {executor}`, but Snakemake would " in done.stdout
    assert "runs/demo" not in done.stdout


@pytest.mark.parametrize(("text", "message"), [
    ("a: 1\n\tb: 2\n", "line 2 is not valid YAML: found character '\\t' that cannot start any token."),
    ("a: {b: 1\nc: 2\n", "line 2 is not valid YAML: expected ',' or '}', but got ':'."),
    ("a: *b\n", "line 1 is not valid YAML: found undefined alias 'b'."),
    ("a: 1\na: 2\n", "line 2 is not valid YAML: the key 'a' occurs twice."),
    ("a: \xff\n", "line 1 is not valid UTF-8. Save the file as UTF-8."),
    ("", " has no keys. See config/README.md for the keys."),
    ("cluster: c\nruns: {}\n", " cannot be used:\n  runs: add at least one run."),
])  # fmt: skip
def test_a_file_that_cannot_be_used_is_reported_without_python(checkout: Checkout, text: str, message: str) -> None:
    """Both the configuration of the clone and a file of ``--configfile``, which Snakemake reads before the workflow."""
    for name, options in (("config/config.yaml", ()), ("mine.yaml", ("--configfile", "mine.yaml"))):
        (checkout.root / name).write_bytes(text.encode("latin-1"))
        done = checkout("snakemake", *PROFILE, "-n", *options, check=False)
        assert done.returncode == 1
        assert message in done.stdout and name in done.stdout
        assert 'File "' not in done.stdout and "Traceback" not in done.stdout


def test_a_configuration_is_relative_to_where_the_command_is_called(checkout: Checkout) -> None:
    """As in Snakemake, also with --directory."""
    (checkout.root / "work").mkdir()
    for name in ("config", "resources"):
        (checkout.root / "work" / name).symlink_to(checkout.root / name)
    shutil.copy(checkout.root / "config/config.yaml", checkout.root / "mine.yaml")
    done = checkout("snakemake", *PROFILE, "--directory", "work", "-n", "plan", "--configfile", "mine.yaml")
    assert "plan_run" in done.stdout
