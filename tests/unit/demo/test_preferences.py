"""The data of examples: two spellings in conversations, the short one in chosen answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.inputs import check_script
from shardmake.config.load import load_config
from shardmake.demo import make_preferences
from tests.workflow.checkout import REPOSITORY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    make_preferences(folder)
    return folder


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_conversations_have_both_spellings(folder: Path) -> None:
    answers = [row["messages"][1]["content"] for row in rows(folder, "train.jsonl")]
    assert 0.45 < sum(answer.startswith("-N") for answer in answers) / len(answers) < 0.55
    assert all(answer.startswith(("-N", "--nodes=")) for answer in answers)


def test_both_answers_of_a_pair_are_the_same_options(folder: Path) -> None:
    pair = rows(folder, "held-out-pairs.jsonl")[0]
    chosen, rejected = (pair[name][0]["content"] for name in ("chosen", "rejected"))
    assert chosen == rejected.replace("--nodes=", "-N").replace("--time=", "-t").replace("--partition=", "-p")
    for pair in [*rows(folder, "pairs.jsonl"), *rows(folder, "held-out-pairs.jsonl")]:
        assert pair["chosen"][0]["content"].startswith("-N") and pair["rejected"][0]["content"].startswith("--nodes=")
    answers = [row["messages"][1:] for row in rows(folder, "held-out-answers.jsonl")]
    assert answers == [pair["chosen"] for pair in rows(folder, "held-out-pairs.jsonl")]


def test_no_request_is_trained_on_and_held_out(folder: Path) -> None:
    trained = {row["messages"][0]["content"] for row in rows(folder, "train.jsonl")}
    trained |= {row["prompt"][0]["content"] for row in rows(folder, "pairs.jsonl")}
    held_out = {row["messages"][0]["content"] for row in rows(folder, "eval.jsonl")}
    held_out |= {row["prompt"][0]["content"] for row in rows(folder, "held-out-pairs.jsonl")}
    assert not trained & held_out


def test_the_examples_share_their_first_run_and_name_this_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = REPOSITORY / "examples"
    preferences, grpo = (load_config(examples / f"{name}.yaml").runs for name in ("preferences", "grpo"))
    assert preferences["sbatch-answers"] == grpo["sbatch-answers"]
    named = [run.data for runs in (preferences, grpo) for run in runs.values()]
    files = {Path(name) for data in named for name in (data.train, data.eval) if isinstance(name, str)}
    assert {file.parent for file in files} == {Path("resources/preferences")}
    assert all((folder / file.name).exists() for file in files)
    monkeypatch.chdir(REPOSITORY)
    check_script("script", Path(str(grpo["sbatch-rewarded"].script)))
