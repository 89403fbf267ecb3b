"""The merged configuration of one invocation of Snakemake, and the checks before Snakemake reads a file."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardmake.cli import app
from shardmake.config import invocation
from shardmake.config.load import load_config, parse_config
from shardmake.config.models import Cluster
from shardmake.core.environment import CONFIG_VARIABLE
from shardmake.core.errors import ConfigError
from tests.unit.config.samples import CLUSTER, RUN, write


def values(**changes: Any) -> dict[str, Any]:
    return {"cluster": "c.yaml", "runs": {"chat": {**RUN, **changes}}}


def test_another_configuration_never_changes_a_merged_file(tmp_path: Path) -> None:
    first = invocation.write_merged(parse_config(values(), "a"), "a", tmp_path)
    before = first.read_bytes(), first.stat().st_mtime_ns
    second = invocation.write_merged(parse_config(values(seed=7), "a"), "a", tmp_path)
    again = invocation.write_merged(parse_config(values(), "a"), "a", tmp_path)
    assert second != first == again and (first.read_bytes(), first.stat().st_mtime_ns) == before
    assert sorted(tmp_path.iterdir()) == sorted([first, second])


def test_messages_about_the_merged_file_name_the_files_of_the_user(tmp_path: Path) -> None:
    merged = invocation.write_merged(parse_config(values(), "a"), "/home/ada/mine.yaml + --config", tmp_path)
    merged.write_text(merged.read_text().replace("max_steps: 60", "max_steps: 0"))
    words = r"^/home/ada/mine\.yaml \+ --config cannot be used:\n  runs\.chat\.max_steps: "
    with pytest.raises(ConfigError, match=words):
        load_config(merged)


def test_a_file_with_a_password_is_for_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = parse_config(values(push={"to": "s3://ada:hunter2hunter2@bucket/x"}), "a")
    path = invocation.write_merged(config, "a", tmp_path / "shared")
    assert path.is_relative_to(tmp_path / "cache") and not (tmp_path / "shared").exists()
    assert path.parent.stat().st_mode & 0o077 == 0 and load_config(path) == config


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^Cannot write .*: .* Run Snakemake in a folder that you can write to\.$"):
        invocation.write_merged(parse_config(values(), "a"), "a", tmp_path / "file")


def test_commands_read_the_file_of_the_environment_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    merged = invocation.write_merged(parse_config(values(), "a"), "a", tmp_path)
    monkeypatch.setenv(CONFIG_VARIABLE, str(merged))
    own = write(tmp_path / "own.yaml", {"cluster": "other.yaml", "runs": {"chat": RUN}})
    answer = CliRunner().invoke(app, ["status", "chat"])
    assert str(answer.exception).startswith("cluster: 'c.yaml' does not exist")
    answer = CliRunner().invoke(app, ["status", "chat", "--config", str(own)])
    assert str(answer.exception).startswith("cluster: 'other.yaml' does not exist")


@pytest.mark.parametrize(("words", "missing"), [
    ("status", "c.yaml"), ("status chat", "c.yaml"), ("logs chat", "c.yaml"), ("list", "c.yaml"), ("compare a b", "c.yaml"),
    ("status other", "config/config.yaml"), ("data chat", "config/config.yaml"), ("list --config no.yaml", "no.yaml"),
])  # fmt: skip
def test_commands_that_show_read_what_the_last_workflow_had(
    words: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder whose configuration has another name than the default; a stage does not take a copy of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    invocation.write_merged(parse_config(values(), "mine.yaml"), "mine.yaml")
    answer = CliRunner().invoke(app, words.split())
    assert re.search(rf"'{missing}' does not exist", str(answer.exception))


def test_sections_of_the_command_line_have_the_types_of_a_file() -> None:
    """Snakemake's own reading makes text of every value in a section."""
    words = ["runs={a: {max_steps: 5, packing: false, push: null}}", "runs={a: {script_args: ['5']}}", "cluster=c.yaml"]
    assert invocation.sections(words) == {
        "runs": {"a": {"max_steps": 5, "packing": False, "push": None, "script_args": ["5"]}}
    }
    with pytest.raises(ConfigError, match=r"^--config runs=\{a: the value is not valid YAML: "):
        invocation.sections(["runs={a"])
    module: dict[str, Any] = {"runs": {"a": {"max_steps": "5", "push": "null", "script_args": ["5", "{"], "seed": "7"}}}
    texts = {"runs": {"a": {"max_steps": "5", "push": "null", "script_args": ["5", "{"]}}}
    invocation.read_texts(module, {"other": {"runs": {"a": {"seed": "8"}}}, "lab": {"tuning": texts}, "x": 1})
    assert module == {"runs": {"a": {"max_steps": 5, "push": None, "script_args": [5, "{"], "seed": "7"}}}


def test_files_are_checked_before_snakemake_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good.yaml", {"a": 1})
    write(tmp_path / "bad.yaml", "a: 1\nb: {c: 1\nd: 2\n")
    invocation.check_config_files(["plan", "--configfile", "good.yaml", "--config", "runs={a: 1", "--cores", "1"])
    invocation.check_config_files(["--configfile"])
    (tmp_path / "report.html").write_text("\0<html>")
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "plan.json").write_text('{"format": 1, "checksum": "c"}')
    for words, message in (
        (
            ["--configfile", "good.yaml", "plan"],
            "--configfile: 'plan' does not exist. .* Write targets before it, such as",
        ),
        (["--configfile", "good.yaml", "runs/x.html"], ".*'runs/x.html' does not exist. .* Write targets before it"),
        (["--configfile", "good.yaml", "report.html"], ".*'report.html' is not YAML. .* Write targets before it"),
        (["--configfile", "good.yaml", "plan.json"], ".*'plan.json' is a file that a step .* Write targets before it"),
        (["--configfile", "empty.yaml"], "empty.yaml has no keys. "),
        (["--configfile", ""], "--configfile: the name is empty. "),
        (["--configfile="], "--configfile: the name is empty. "),
        (["--config", "cluster=good.yaml", "plan"], "--config: 'plan' has no value. .* Write targets before it"),
        (["-C", "runs.r1.max_steps=5"], r".* Write .*: --config 'runs=\{r1: \{max_steps: 5\}\}'\."),
    ):
        with pytest.raises(SystemExit, match=f"^Error: {message}"):
            invocation.check_config_files(words)
    for option in ("--configfile", "--configfiles"):
        with pytest.raises(SystemExit) as end:
            invocation.check_config_files(["-n", option, "good.yaml", "bad.yaml", "--cores", "1"])
        assert end.value.code == "Error: bad.yaml, line 3 is not valid YAML: expected ',' or '}', but got ':'."


@pytest.mark.parametrize(("cluster", "executor", "advice"), [
    ("slurm", "local", "has `executor: slurm`, but Snakemake would run the stages on this machine. Use `--profile slurm`"),
    ("local", "slurm", "has `executor: local`, but Snakemake would submit jobs through 'slurm'. Use `--profile profiles/local`"),
    ("slurm", "slurm", None), ("slurm", "cluster-generic", None), ("local", "local", None), ("slurm", None, None),
    ("local", None, None),
])  # fmt: skip
def test_a_profile_unlike_the_cluster_file_is_rejected(cluster: str, executor: str | None, advice: str | None) -> None:
    file = Cluster(**{**CLUSTER, "executor": cluster})
    message = re.escape(f"cluster: c.yaml {advice}, or name a cluster file with ")
    with pytest.raises(ConfigError, match=f"^{message}") if advice else nullcontext():
        invocation.check_executor(file, "c.yaml", executor)


def test_a_module_needs_a_configuration() -> None:
    invocation.check_module({"runs": {}})
    with pytest.raises(ConfigError, match=r"^The module has no configuration\."):
        invocation.check_module({})
