"""Snakemake as a user calls it: dry runs, a requested stop, odd paths, overridden settings, and a sweep that is compared."""

import json
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardmake.core.environment import CONFIG_VARIABLE
from shardmake.launch.watcher import WAITED_VARIABLE
from shardmake.plan.stage import make_plan
from shardmake.run.paths import RunDir
from shardmake.run.settings import current
from tests.workflow.checkout import LOCAL, PROFILE, REPOSITORY, RUN, Checkout, environment

NODES = {"accelerator": "a100-80gb", "processes_per_node": 4, "cpus_per_node": 32, "memory_gib_per_node": 256}
SLURM = {"executor": "slurm", "max_nodes": 2, "slurm": {"partition": "gpu", "account": "lab"}}


def test_a_dry_run_shows_script_command_and_environment(checkout: Checkout) -> None:
    checkout.configure(NODES | SLURM, strategy="zero3", nodes=2, micro_batch_size=1)
    text = dry_run(checkout)
    for words in (
        "#SBATCH --nodes=2", "#SBATCH --gres=gpu:4", "#SBATCH --account=lab", "shardmake demo: zero3",
        "NCCL_SOCKET_IFNAME==INTERFACE", "--machine_rank K --main_process_ip ADDRESS --main_process_port PORT",
        "shardmake render demo --show",
    ):  # fmt: skip
        assert words in text
    assert not checkout.run.exists()

    write_another_plan(checkout)
    assert "shardmake demo: zero1" in dry_run(checkout)
    checkout.configure(NODES | SLURM, strategy="zero2", nodes=2, micro_batch_size=1)
    text = dry_run(checkout)
    assert "shardmake demo: zero2" in text
    assert "# --- changed since the last plan: strategy: zero3 -> zero2\n" in text


def test_a_run_of_another_version_is_refused_by_snakemake_and_by_every_stage(checkout: Checkout) -> None:
    """A finished training would be made again otherwise, because the settings that it recorded are read differently."""
    receipt = checkout.run / "train/receipt.json"
    receipt.parent.mkdir(parents=True)
    receipt.write_text('{"steps": 60}')
    for command in (("snakemake", *PROFILE), ("shardmake", "train", "demo")):
        done = checkout(*command, check=False)
        assert done.returncode in (1, 2)
        assert "train/receipt.json was made by another version of Shardmake: it has the format 0" in done.stdout
    assert [path for path in checkout.run.rglob("*") if path.is_file()] == [receipt]


def dry_run(checkout: Checkout) -> str:
    return checkout("snakemake", "-n", "--profile", "slurm", "runs/demo/train/receipt.json").stdout


def write_another_plan(checkout: Checkout) -> None:
    run, cluster = checkout.load()
    current("plan", run, cluster).write(RunDir(checkout.run).stage_settings("plan"))
    run = run.model_copy(update={"strategy": "zero1", "model": str(checkout.root / run.model)})
    plan, _ = make_plan("demo", run, cluster)
    plan.write(checkout.run / "plan/plan.json")


def test_snakemake_ends_in_a_line_that_says_how_to_resume(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_nothing_in_the_path_of_the_checkout_is_run(tmp_path: Path, inputs: Path) -> None:
    """Also not in that of its environment, which the rules put into PATH."""
    checkout = Checkout.create(tmp_path / "it's a $(touch was-run) `touch was-run` folder", inputs)
    (checkout.root / ".venv").symlink_to((REPOSITORY / ".venv").resolve())
    command = [checkout.root / ".venv/bin/python", "-m", "snakemake", "--profile", "profiles/local"]
    done = subprocess.run(
        [*command, "runs/demo/sources.json"], cwd=checkout.root, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (checkout.run / "sources.json").exists() and not list(tmp_path.rglob("was-run"))


@pytest.mark.parametrize(("name", "code"), [("it's a folder", 0), ('a "', 1), ("$(touch was-run)", 1), ("`id`", 1)])
def test_an_installation_that_would_run_its_own_path_is_refused(tmp_path: Path, name: str, code: int) -> None:
    """pip writes the path between double quotes into its start scripts."""
    folder = tmp_path / name
    folder.mkdir()
    command = ["bash", str(REPOSITORY / "envs/system.sh"), "demo"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert not code or done.stderr.startswith(f"Cannot install in {folder}.")


OWN = ("push", "learning_rate", "max_steps", "strategy", "evaluation")
DEFAULTS = {key: value for key, value in RUN.items() if key not in OWN} | {
    "data": {"train": "resources/demo/train.jsonl", "eval": "few.jsonl"}, "evaluation": {"batch_tokens": 2048},
}  # fmt: skip


@pytest.mark.training
@pytest.mark.objectives  # minutes, and test_chain.py trains several runs in CI
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
    evaluation = RUN["evaluation"] | {"prompts": ["12:00:00"]}
    equal = write(outside / "equal.yaml", learning_rate=5e-4, seed=7, evaluation=evaluation)
    assert "Nothing to be done" in snakemake(checkout, "--configfile", str(equal))

    # A job of another invocation starts Snakemake again, after a file was damaged while it was in the queue.
    snakemake(checkout, "-n", "--configfile", str(mine))
    merged = sorted((checkout.root / ".snakemake/shardmake").glob("*.yaml"))
    copies = {yaml.safe_load(path.read_text())["runs"]["mine"]["learning_rate"]: path for path in merged}
    assert set(copies) == {5e-4, 9e-4}
    monkeypatch.setenv(CONFIG_VARIABLE, str(copies[9e-4]))
    (checkout.root / "config/config.yaml").write_text("cluster: [\n")
    checkout("snakemake", TARGET, "--mode", "subprocess", "--nolock", "--cores", "1", "--forceall")
    assert settings(checkout) == (9e-4, 42)


def test_values_on_the_command_line_override_the_configuration_of_the_clone(checkout: Checkout) -> None:
    values = "runs={demo: {learning_rate: 5.0e-4, max_steps: 5, push: null}}"
    checkout("snakemake", *PROFILE, "runs/demo/plan/training.json", "--config", values)
    arguments = checkout.read("plan/training.json")["arguments"]
    assert (arguments["learning_rate"], arguments["max_steps"]) == (5e-4, 5)


@pytest.mark.parametrize(("executor", "profile"), [("local", "slurm"), ("slurm", "profiles/local")])
def test_a_profile_against_the_cluster_file_is_rejected(checkout: Checkout, executor: str, profile: str) -> None:
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
