"""Files that a run names: which exist, and which hold the same examples; no two runs push to one place."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from snakemake.io import apply_wildcards
from snakemake.pathvars import Pathvars

from shardmake.config.inputs import check_inputs, local_files
from shardmake.config.load import parse_config
from shardmake.config.models import Config
from shardmake.core.errors import ConfigError, ShardmakeError
from tests.unit.config.samples import RUN, make_run, write


def test_own_files_must_exist_and_be_readable(tmp_path: Path) -> None:
    own = write(tmp_path / "ds.json", '{"zero_optimization": {"stage": 2},}')
    run = make_run(deepspeed_config=str(own), accelerate_config=str(tmp_path / "none.yaml"))
    with pytest.raises(ShardmakeError, match=r"^runs\.chat\.accelerate_config: '.*none\.yaml' is not a file in "):
        check_inputs("chat", run)
    with pytest.raises(ShardmakeError, match=r"^deepspeed_config: .*ds\.json, line 1 is not valid JSON"):
        check_inputs("chat", run.model_copy(update={"accelerate_config": None}))


@pytest.mark.parametrize(("folder", "found"), [
    ("{lab}", "{"), ("a<lab_1>", "<lab_1>"),
    *((name, "") for name in ("a < b > c", "<Lab>", "$(touch x)", "a'b\"c", "*?[x]", "}")),
])  # fmt: skip
def test_a_path_in_which_snakemake_replaces_something_is_refused(tmp_path: Path, folder: str, found: str) -> None:
    """Snakemake takes the others as they are."""
    file = tmp_path / folder / "train.jsonl"
    file.parent.mkdir()
    file.touch()
    expected = f"runs.a: {str(file)!r} has {found} in its path, which Snakemake takes for a wildcard or a variable."
    with pytest.raises(ShardmakeError, match=re.escape(expected)) if found else nullcontext():
        check_inputs("a", make_run(model="org/model", data={"train": str(file)}))
    assert found or Pathvars.with_defaults().apply(str(file)) == apply_wildcards(str(file), {}) == str(file)


@pytest.mark.parametrize(("model", "data"), [("gpt2", "org/data"), ("org/model", "data"), ("org/model", "./org/data")])
def test_a_name_that_is_neither_a_path_nor_a_hub_id_is_refused(model: str, data: str) -> None:
    with pytest.raises(ShardmakeError, match=r"is not a model folder.*or a hub id|does not exist\..*or a hub data set"):
        check_inputs("a", make_run(model=model, data={"train": data}))
    check_inputs("a", make_run(model="org/model", data={"train": "org/data:split"}))


def test_files_of_a_model_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    for name in ("config.json", "chat_template.jinja", "model.safetensors", "README.md", "tokenizer.json"):
        write(tmp_path / "base" / name, "{}")
    run = make_run(model="base", data={"train": "org/data", "eval": "data/eval.jsonl"})
    assert local_files(run, "model") == ["base/config.json", "base/chat_template.jinja", "base/tokenizer.json"]
    assert local_files(run, "data") == ["data/eval.jsonl"] and local_files(make_run(model="org/base"), "model") == []
    with pytest.raises(
        ShardmakeError, match=r"^runs\.chat\.data: 'data/eval\.jsonl' does not exist\. Name an existing "
    ):
        check_inputs("chat", run)
    (tmp_path / "base" / "config.json").unlink()
    with pytest.raises(ShardmakeError, match=r"^runs\.chat\.model: 'base' is not a model folder\. It has no config"):
        check_inputs("chat", run)


def test_every_file_of_a_data_folder_is_an_input(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "part").mkdir(parents=True)
    for name in ("b.jsonl", "part/a.jsonl", ".hidden.jsonl", "dataset_info.json", "notes.txt"):
        write(folder / name, "{}")
    run = make_run(data={"train": str(folder)})
    assert local_files(run, "data") == [str(folder / "b.jsonl"), str(folder / "part/a.jsonl")]
    (tmp_path / "empty").mkdir()
    assert local_files(make_run(data={"train": str(tmp_path / "empty")}), "data") == [str(tmp_path / "empty")]


@pytest.fixture
def data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two files of different examples, a copy, a symbolic and a hard link of the first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data/train.jsonl", '{"text": "a"}\n')
    write(tmp_path / "data/other.jsonl", '{"text": "b"}\n')
    write(tmp_path / "copy.jsonl", '{"text": "a"}\n')
    write(tmp_path / "eval.jsonl", '{"text": "b"}\n')
    (tmp_path / "link.jsonl").symlink_to("data/train.jsonl")
    (tmp_path / "hard.jsonl").hardlink_to("data/train.jsonl")
    return tmp_path


@pytest.mark.parametrize(("train", "held_out", "same"), [
    ("data/train.jsonl", "data/train.jsonl", True), ("data/train.jsonl", "./data/../data/train.jsonl", True),
    ("data/train.jsonl", "link.jsonl", True), ("data/train.jsonl", "hard.jsonl", True),
    ("data/train.jsonl", "copy.jsonl", True), ("org/data", "org/data:train", True),
    ("org/data:all", "org/data:all", True), ("data/train.jsonl", "eval.jsonl", False),
    ("org/data", "org/data", False), ("org/data", "org/data:test", False),
])  # fmt: skip
def test_evaluation_on_the_training_data_is_rejected(train: str, held_out: str, same: bool, data_files: Path) -> None:
    message = rf"^runs\.chat\.data\.eval: '{held_out}' has the examples of data\.train "
    with pytest.raises(ShardmakeError, match=message) if same else nullcontext():
        check_inputs("chat", make_run(data={"train": train, "eval": held_out}))


def runs(**pushes: Any) -> Config:
    values = {name: {**RUN, "push": push if isinstance(push, dict) else {"to": push}} for name, push in pushes.items()}
    return parse_config({"cluster": "c", "runs": values}, "c")


@pytest.mark.parametrize(("first", "second", "same"), [
    ("file:published/x", "file:published/x", True), ("file:published/x", "file:published/x/", True),
    ("file:published/x", "file:./published//y/../x", True), ("file:published/x", ["hub:lab/x", "file:link/x"], True),
    ("file:published", "file:published/x", True), ("hub:lab/x", "hub:Lab/X", True),
    ("hub:lab/x", {"to": "hub:lab/x", "revision": "main"}, True), ("s3://bucket/x", "s3://bucket/x/", True),
    ("s3://bucket/x", "s3://bucket//./x", True), ("file:published/x", "file:published/xy", False),
    ("file:published/{run}", "file:published/{run}", False), ("hub:lab/x", "file:lab/x", False),
    ("hub:lab/x", {"to": "hub:lab/x", "revision": "second"}, False), ("s3://bucket/x", "gs://bucket/x", False),
    ({"to": "hub:lab/x", "pull_request": True}, {"to": "hub:lab/x", "pull_request": True}, False),
])  # fmt: skip
def test_same_destination(first: Any, second: Any, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "published").mkdir()
    (tmp_path / "link").symlink_to("published")
    message = r"runs: run 'a' pushes to '.*', 'b' to '.*'\. One would replace the other\. Write "
    with pytest.raises(ConfigError, match=message) if same else nullcontext():
        assert list(runs(a=first, b=second).runs) == ["a", "b"]
