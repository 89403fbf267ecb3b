"""`shardmake init` writes a configuration that can be used, asks for what is missing, and never overwrites."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from shardmake.cli import app
from shardmake.commands.init import Answers, ask, write_config
from shardmake.commands.workflow import snakemake_arguments, write_project
from shardmake.config.load import load_cluster, load_config
from shardmake.core.environment import PROJECT
from shardmake.core.errors import ConfigError

CLUSTER = {"executor": "local", "processes_per_node": 2, "cpus_per_node": 2, "memory_gib_per_node": 4}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a cluster file, data, and a model of 512 positions."""
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(json.dumps(CLUSTER))
    Path("train.jsonl").write_text('{"text": "a"}\n')
    Path("my base").mkdir()
    Path("my base/config.json").write_text('{"max_position_embeddings": 512}')
    return tmp_path


def write(out: str = "runs.yaml", **changes: Any) -> str:
    values = {"model": "my base", "data": "train.jsonl", "cluster": "cluster.yaml", "name": "", "method": "lora"}
    return write_config(Answers(**(values | changes)), Path(out))


@pytest.mark.parametrize(("out", "option"), [("config/config.yaml", ""), ("it's $(mine).yaml", " --configfile FILE")])
def test_the_file_is_valid_and_the_next_command_is_named(out: str, option: str) -> None:
    next_step = write(out)
    config = load_config(Path(out))
    assert list(config.runs) == ["my-base"] and config.cluster == "cluster.yaml"
    run = config.runs["my-base"]
    assert (run.model, run.data.train, run.method, run.sequence_length) == ("my base", "train.jsonl", "lora", 512)
    assert next_step.splitlines()[-1] == "  shardmake run plan" + option.replace("FILE", shlex.quote(out))


@pytest.mark.parametrize("name", ["no", "1e3", "a: b #c", "[x]", "it's"])
def test_any_name_of_a_file_is_read_back_unchanged(name: str) -> None:
    Path(f"{name}.jsonl").write_text('{"text": "a"}\n')
    write(data=f"{name}.jsonl")
    assert yaml.safe_load(Path("runs.yaml").read_text())["runs"]["my-base"]["data"]["train"] == f"{name}.jsonl"


@pytest.mark.parametrize(("changes", "message"), [
    ({"cluster": "none.yaml"}, "--cluster: 'none.yaml' is not a file."), ({"data": "none.jsonl"}, "does not exist"),
    ({"model": "./none"}, "is not a model folder"), ({"name": "a/b"}, "cannot be the name of a run's folder"),
])  # fmt: skip
def test_nothing_is_written_if_a_value_cannot_be_used(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write(**changes)
    assert not Path("runs.yaml").exists()


def test_the_demo_is_written_beside_a_workflow_and_takes_no_other_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmake.cli.files.demo", lambda folder: None)
    Path("Snakefile").write_text("mine")
    refused = CliRunner().invoke(app, ["init", "--demo", "--model", "my base"])
    assert str(refused.exception).startswith("init: --model has no effect with --demo.")
    assert CliRunner().invoke(app, ["init", "--demo"]).exit_code == 0
    assert load_cluster(Path(load_config(Path("config/config.yaml")).cluster)).executor == "local"
    assert Path("Snakefile").read_text() == "mine"


def test_a_file_is_never_overwritten() -> None:
    Path("runs.yaml").write_text("mine")
    with pytest.raises(ConfigError, match=r"^--out: 'runs\.yaml' exists"):
        write()
    assert Path("runs.yaml").read_text() == "mine"


def test_questions_are_asked_at_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"model": "", "data": "train.jsonl", "cluster": ""}
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(ConfigError, match=r"^init: --model, --cluster is missing\."):
        ask(flags)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setenv("HOME", "/home/me")
    answers = iter(["~/base ", "cluster.yaml"])
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    assert ask(flags) == {"model": "/home/me/base", "data": "train.jsonl", "cluster": "cluster.yaml"}


def test_the_command_writes_a_folder_for_the_workflow_and_later_only_further_configurations() -> None:
    words = ["init", "--model", "my base", "--data", "train.jsonl", "--cluster", "cluster.yaml", "--name", "chat"]
    Path(".gitignore").write_text("mine")
    for out in ("config/config.yaml", "runs.yaml"):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0 and done.output.startswith(f"Wrote {out}: the run chat.\n")
        assert list(load_config(Path(out)).runs) == ["chat"]
        Path("Snakefile").write_text("mine")
    assert Path("Snakefile").read_text() == Path(".gitignore").read_text() == "mine"
    assert load_cluster(Path("config/clusters/local.yaml")).executor == "local"
    for profile in ("slurm", "profiles/local", "profiles/default"):
        assert yaml.safe_load(Path(profile, "config.yaml").read_text())


@pytest.mark.parametrize(("words", "added"), [
    ([], ["--snakefile", f"{PROJECT}/Snakefile", "--profile", f"{PROJECT}/profiles/local"]),
    (["-n", "plan", "--configfile=a.yaml"], ["--snakefile", f"{PROJECT}/Snakefile", "--profile", f"{PROJECT}/profiles/slurm"]),
    (["-n", "--config", "cluster=nodes.yaml"], ["--snakefile", f"{PROJECT}/Snakefile", "--profile", f"{PROJECT}/profiles/slurm"]),
    (["-d", "below", "--configfile=a.yaml"], ["--snakefile", f"{PROJECT}/Snakefile", "--profile", f"{PROJECT}/profiles/local"]),
    (["-s", "mine", "--profile", "x"], []),
])  # fmt: skip
def test_run_adds_what_the_folder_lacks(words: list[str], added: list[str]) -> None:
    write("config/config.yaml")
    Path("nodes.yaml").write_text(json.dumps(CLUSTER | {"executor": "slurm"}))
    write("a.yaml", cluster="nodes.yaml")
    Path("below").mkdir()
    Path("below/nodes.yaml").write_text(json.dumps(CLUSTER))
    assert snakemake_arguments(words) == [*added, *words]
    Path("Snakefile").write_text("rule other:\n    output: 'x'\n")  # not ours, and stays
    assert snakemake_arguments(words) == [*added, *words]
    Path("Snakefile").unlink()
    with pytest.raises(ConfigError, match="takes every word after it as a file"):
        snakemake_arguments(["--configfile", "a.yaml", "plan"])
    write_project()
    own = ["--profile", Path(added[-1]).name] if added else []
    assert [word.removeprefix("profiles/") for word in snakemake_arguments(words)] == [*own, *words]


@pytest.mark.parametrize(("text", "objective", "batch", "epochs"), [
    ("x" * 44_000, "sft", 2, 3), ("x" * 220_000, "sft", 2, 1), ("x" * 4_400_000, "sft", 32, 1),
    ("x" * 44_000_000, "sft", 64, 1), ("", "sft", 64, 1), ("{}\n" * 420, "dpo", 8, 1), ("{}\n" * 90, "kto", 4, 3),
])  # fmt: skip
def test_the_batch_follows_from_the_size_of_the_data(text: str, objective: Any, batch: int, epochs: int) -> None:
    Path("many.jsonl").write_text(text)
    write(data="many.jsonl" if text else "lab/on-the-hub", objective=objective)
    run = load_config(Path("runs.yaml")).runs["my-base"]
    assert (run.global_batch_size, run.epochs) == (batch, epochs)


def test_the_batch_is_a_multiple_of_the_ranks_and_the_learning_rate_follows_the_objective() -> None:
    Path("cluster.yaml").write_text(json.dumps(CLUSTER | {"processes_per_node": 6}))
    write(data="lab/on-the-hub", objective="dpo")
    run = load_config(Path("runs.yaml")).runs["my-base"]
    assert (run.objective, run.packing, run.learning_rate, run.global_batch_size) == ("dpo", False, 2e-5, 48)


def test_a_file_of_another_tool_becomes_a_run_and_lists_the_rest(folder: Path) -> None:
    theirs = {"base_model": "my base", "datasets": [{"path": "train.jsonl"}], "neftune_noise_alpha": 5}
    Path("axolotl.yaml").write_text(yaml.safe_dump(theirs))
    words = ["init", "--from", "axolotl.yaml", "--cluster", "cluster.yaml", "--objective", "sft"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    assert "Not translated, and may change the result:\n  neftune_noise_alpha: 5\n" in done.output
    written = Path("config/config.yaml")
    assert "#   neftune_noise_alpha: 5\n" in written.read_text()
    run = load_config(written).runs["my-base"]
    assert run.data.train == "train.jsonl" and run.global_batch_size == 2
    Path("lf.yaml").write_text("{model_name_or_path: my base, finetuning_type: lora, dataset: mine}")
    with pytest.raises(ConfigError, match=r"^lf\.yaml does not say what --data is\. Add the option\.$"):
        write("other.yaml", source=Path("lf.yaml"), model="", data="", method=None)
    write("other.yaml", source=Path("lf.yaml"), model="", method=None)
    assert load_config(Path("other.yaml")).runs["my-base"].lora.rank == 8
