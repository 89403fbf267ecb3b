"""Runs with the same examples, tokenizer and settings share their tokenized files."""

import shutil
import threading
from pathlib import Path

import pytest

from shardmake.core.atomic import digest
from shardmake.data import stage
from shardmake.data.stage import ENCODING, prepare
from shardmake.run.paths import RunDir
from tests.unit.data.test_chat import LEARNED, encoder
from tests.unit.data.test_stage import conversations, make_run, model, write_rows
from tests.unit.data.test_trl import ADDED, CHAT, TEXT, of_ours, tokenizer_that_adds

__all__ = ["model"]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The workspaces in which data was tokenized."""
    found: list[Path] = []
    original = stage.build

    def build(*arguments: object, **named: object) -> object:
        found.append(arguments[3])  # type: ignore[arg-type]
        return original(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "build", build)
    return found


def test_equal_content_is_tokenized_once(model: Path, tmp_path: Path, built: list[Path]) -> None:
    """Also from a copy in another folder, as of a fetched data set; another seed has other held-out examples."""
    examples = write_rows(tmp_path / "t.jsonl", conversations(30))
    (tmp_path / "copy").mkdir()
    copy = shutil.copy(examples, tmp_path / "copy/t.jsonl")
    first = prepare(make_run(model, {"train": examples}, learning_rate=1e-5), RunDir(tmp_path / "runs/a"))
    second = prepare(make_run(model, {"train": str(copy)}, learning_rate=2e-5), RunDir(tmp_path / "runs/b"))
    assert len(built) == 1 and second.digest == first.digest
    assert second.sources["train"]["files"][0]["path"] == str(copy)
    arrow = second.train.files[0].path
    assert (tmp_path / "runs/a/data" / arrow).samefile(tmp_path / "runs/b/data" / arrow)
    shutil.rmtree(tmp_path / "runs/a")
    assert prepare(make_run(model, {"train": str(copy)}), RunDir(tmp_path / "runs/b")) == second
    assert len(built) == 1
    assert prepare(make_run(model, {"train": examples}, seed=7), RunDir(tmp_path / "runs/c")).digest != first.digest
    assert len(built) == 2


def test_damaged_files_of_another_run_are_not_taken(model: Path, tmp_path: Path, built: list[Path]) -> None:
    run = make_run(model, {"train": write_rows(tmp_path / "t.jsonl", conversations(30))})
    first = prepare(run, RunDir(tmp_path / "runs/a"))
    arrow = tmp_path / "runs/a/data" / first.train.files[0].path
    content = bytearray(arrow.read_bytes())
    content[-9] ^= 1
    arrow.write_bytes(content)
    assert prepare(run, RunDir(tmp_path / "runs/b")) == first
    assert len(built) == 2
    assert (tmp_path / "runs/b/data" / first.train.files[0].path).read_bytes() != arrow.read_bytes()


def test_files_of_other_encoding_rules_are_not_taken(
    model: Path, tmp_path: Path, built: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that has them keeps them."""
    run = make_run(model, {"train": write_rows(tmp_path / "t.jsonl", conversations(30))})
    first = prepare(run, RunDir(tmp_path / "runs/a"))
    monkeypatch.setattr("shardmake.data.stage.ENCODING", 0)
    assert prepare(run, RunDir(tmp_path / "runs/b")).encoding == 0
    assert prepare(run, RunDir(tmp_path / "runs/a")) == first and len(built) == 2


def test_other_tokens_have_another_version_of_the_encoding() -> None:
    """If tokens or masks change on purpose, raise ENCODING, and write the new digest beside it."""
    chats = [encoder(template)(row, "here") for _, template, row, _ in LEARNED]
    others = [
        of_ours(tokenizer_that_adds(added), "sft" if case == "text" else case, form[case])  # type: ignore[arg-type]
        for added in ADDED.values()
        for form in (TEXT, CHAT)
        for case in form
    ]
    assert (ENCODING, digest([chats, others])) == (3, "2c051af3743de0bd"), "raise ENCODING: examples have other tokens"


def test_runs_that_start_together_wait_for_the_first_one(model: Path, tmp_path: Path, built: list[Path]) -> None:
    run = make_run(model, {"train": write_rows(tmp_path / "t.jsonl", conversations(30))})
    threads = [threading.Thread(target=prepare, args=(run, RunDir(tmp_path / "runs" / name))) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert (tmp_path / "runs/a/data/receipt.json").read_bytes() == (tmp_path / "runs/b/data/receipt.json").read_bytes()
