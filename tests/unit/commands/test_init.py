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
from shardmake.config.load import load_config
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


def clone() -> None:
    """Make this folder one in which Snakemake can run."""
    Path("Snakefile").touch()
    Path("workflow").mkdir()
    Path("workflow/Snakefile").touch()


def write(out: str = "runs.yaml", **changes: Any) -> str:
    values = {"model": "my base", "data": "train.jsonl", "cluster": "cluster.yaml", "name": "", "method": "lora"}
    return write_config(Answers(**(values | changes)), Path(out))


def test_the_file_is_valid_and_the_next_command_is_named() -> None:
    clone()
    next_step = write()
    config = load_config(Path("runs.yaml"))
    assert list(config.runs) == ["my-base"] and config.cluster == "cluster.yaml"
    run = config.runs["my-base"]
    assert (run.model, run.data.train, run.method, run.sequence_length) == ("my base", "train.jsonl", "lora", 512)
    assert next_step.splitlines()[-1] == "  snakemake --profile profiles/local plan --configfile runs.yaml"


def test_outside_the_clone_every_path_is_absolute(folder: Path) -> None:
    next_step = write("new folder/it's $(mine).yaml", model="Qwen/Qwen2.5-7B")
    file = folder / "new folder/it's $(mine).yaml"
    config = load_config(file)
    run = config.runs["qwen2.5-7b"]
    assert run.model == "Qwen/Qwen2.5-7B" and run.data.train == str(folder / "train.jsonl")
    assert config.cluster == str(folder / "cluster.yaml")
    assert "In the folder of your clone of Shardmake, run this next." in next_step
    assert shlex.split(next_step.splitlines()[-1])[-1] == str(file)


@pytest.mark.parametrize("name", ["no", "1e3", "a: b #c", "[x]", "it's"])
def test_any_name_of_a_file_is_read_back_unchanged(name: str) -> None:
    clone()
    Path(f"{name}.jsonl").write_text('{"text": "a"}\n')
    write(data=f"{name}.jsonl")
    assert yaml.safe_load(Path("runs.yaml").read_text())["runs"]["my-base"]["data"]["train"] == f"{name}.jsonl"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": "none.yaml"}, "--cluster: 'none.yaml' is not a file."),
        ({"data": "none.jsonl"}, "does not exist"),
        ({"model": "./none"}, "is not a model folder"),
        ({"name": "a/b"}, "cannot be the name of a run's folder"),
    ],
)
def test_nothing_is_written_if_a_value_cannot_be_used(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write(**changes)
    assert not Path("runs.yaml").exists()


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
    answers = iter(["org/base ", "cluster.yaml"])
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    assert ask(flags) == {"model": "org/base", "data": "train.jsonl", "cluster": "cluster.yaml"}


def test_the_command(folder: Path) -> None:
    words = ["init", "--model", "my base", "--data", "train.jsonl", "--cluster", "cluster.yaml", "--name", "chat"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and done.output.startswith("Wrote runs.yaml: the run chat.\n")
    assert list(load_config(Path("runs.yaml")).runs) == ["chat"]


@pytest.mark.parametrize(
    ("size", "batch", "epochs"),
    [(44_000, 2, 3), (220_000, 2, 1), (4_400_000, 32, 1), (44_000_000, 64, 1), (None, 64, 1)],
)
def test_the_batch_follows_from_the_size_of_the_data(size: int | None, batch: int, epochs: int) -> None:
    Path("many.jsonl").write_text("x" * (size or 0))
    write(data="many.jsonl" if size else "lab/on-the-hub")
    run = load_config(Path("runs.yaml")).runs["my-base"]
    assert (run.global_batch_size, run.epochs) == (batch, epochs)


def test_the_learning_rate_follows_the_objective_and_the_result_is_valid() -> None:
    write(objective="dpo")
    run = load_config(Path("runs.yaml")).runs["my-base"]
    assert (run.objective, run.packing, run.learning_rate) == ("dpo", False, 2e-5)


def test_a_file_of_another_tool_becomes_a_run_and_lists_the_rest(folder: Path) -> None:
    Path("axolotl.yaml").write_text(
        yaml.safe_dump({"base_model": "my base", "datasets": [{"path": "train.jsonl"}], "neftune_noise_alpha": 5})
    )
    words = ["init", "--from", "axolotl.yaml", "--cluster", "cluster.yaml", "--objective", "sft"]
    done = CliRunner().invoke(app, words)
    assert (
        done.exit_code == 0 and "Not translated, and may change the result:\n  neftune_noise_alpha: 5\n" in done.output
    )
    assert "#   neftune_noise_alpha: 5\n" in Path("runs.yaml").read_text()
    run = load_config(Path("runs.yaml")).runs["my-base"]
    assert run.data.train == str(folder / "train.jsonl") and run.global_batch_size == 2
    Path("lf.yaml").write_text("{model_name_or_path: my base, finetuning_type: lora, dataset: mine}")
    with pytest.raises(ConfigError, match=r"^lf\.yaml does not say where to find what --data names\. Add it\.$"):
        write("other.yaml", source=Path("lf.yaml"), model="", data="", method=None)
    write("other.yaml", source=Path("lf.yaml"), model="", method=None)
    assert load_config(Path("other.yaml")).runs["my-base"].lora.rank == 8
