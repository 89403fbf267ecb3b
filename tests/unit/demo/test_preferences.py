"""The data of examples: requests in words with sbatch's options, in two spellings, the short one in chosen answers."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.inputs import check_script
from shardmake.config.load import load_config
from shardmake.demo import make_preferences
from shardmake.demo.requests import Limit, Request, make_requests
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


REQUEST = Request(
    nodes=2, gpus=4, kind="h100", limit=Limit("two days", "2-00:00:00"), partition="long", memory=128, exclusive=True,
    requeue=True,
)  # fmt: skip


def test_options_are_in_one_order() -> None:
    assert REQUEST.options() == (
        "--nodes=2 --gpus-per-node=h100:4 --time=2-00:00:00 --partition=long --mem=128G --exclusive --requeue"
    )


def test_a_sentence_says_everything_that_the_options_say() -> None:
    rng = random.Random(0)
    sentences = {REQUEST.sentence(rng) for _ in range(200)}
    assert len(sentences) > 100, "many phrasings"
    for sentence in sentences:
        assert re.search(r"\b(2|two) nodes,.*H100", sentence) and re.search(r"\b(4|four)\b.* H100", sentence)
        assert "two days" in sentence and " long" in sentence and "128 GB" in sentence
        assert re.search("nobody else|for me alone", sentence) and re.search("restart it|be restarted", sentence)


def test_requests_differ_and_are_the_same_every_time() -> None:
    first = make_requests(500, random.Random(1))
    assert len(set(first)) == 500 and first == make_requests(500, random.Random(1))


def test_every_option_has_a_valid_value() -> None:
    time = re.compile(r"(\d-)?\d\d:\d\d:00")
    for request in make_requests(500, random.Random(2)):
        options = dict(re.findall(r"--([a-z-]+)=(\S+)", request.options()))
        assert time.fullmatch(options["time"]) and int(options["nodes"]) in range(1, 17)
        assert options.keys() >= {"nodes", "gpus-per-node", "time"}
