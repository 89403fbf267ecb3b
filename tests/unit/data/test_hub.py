"""Data sets from a hub: splits, subsets, commits, and what is said when there is none."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardmake
from tests.hub import FakeHub

PACKAGE = str(Path(shardmake.__file__).parents[1])

SUBSET = """
- config_name: {name}
  data_files:
  - {{split: train, path: train.jsonl}}
  - {{split: test, path: test.jsonl}}"""
READ = """
import json, sys
from pathlib import Path
from shardmake.config.models import Data
from shardmake.data import sources
from shardmake.core.errors import ShardmakeError

for name, splits, data in json.loads(sys.argv[1]):
    try:
        source = sources.locate(name, Data(train=name, **data), splits)
        commit = sources.identity(source)["commit"]
        rows = sources.read(source, Path("cache"))
        print(json.dumps([commit, [sources.open_row(row, source)[::2] for row in rows]]))
    except ShardmakeError as error:
        print(json.dumps(str(error)))
"""


def card(*subsets: str) -> bytes:
    return f"---\nconfigs:{''.join(SUBSET.format(name=name) for name in subsets)}\n---\n".encode()


def rows(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[FakeHub]:
    with FakeHub(folder / "hub") as hub:
        files = {"train.jsonl": rows("a", "b"), "test.jsonl": rows("c")}
        hub.add("datasets/lab/plain", {"README.md": card("default"), **files})
        hub.add("datasets/lab/parts", {"README.md": card("main", "small"), **files})
        hub.add("datasets/lab/broken", {"README.md": card("default"), "train.jsonl": b"{", "test.jsonl": rows("c")})
        yield hub


def ask(hub: FakeHub, folder: Path, *questions: tuple[str, tuple[str, ...], dict[str, str]], **env: str) -> list[Any]:
    """Return what a fresh process finds for each name, splits and settings."""
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(questions)],
        cwd=folder,
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "PYTHONPATH": PACKAGE, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


TRAIN, EVAL = ("train",), ("validation", "test")


def test_splits_and_subsets_are_read_with_their_commit_also_offline(hub: FakeHub, folder: Path) -> None:
    plain, parts = (hub.repositories[f"datasets/lab/{name}"].refs["main"] for name in ("plain", "parts"))
    questions = [
        ("lab/plain", TRAIN, {}),
        ("lab/plain", EVAL, {"revision": "main"}),
        ("lab/plain:test", TRAIN, {}),
        ("lab/parts", EVAL, {"subset": "main"}),
    ]
    found = ask(hub, folder, *questions)
    assert found == [
        [plain, [["lab/plain, row 1", {"text": "a"}], ["lab/plain, row 2", {"text": "b"}]]],
        [plain, [["lab/plain, row 1", {"text": "c"}]]],
        [plain, [["lab/plain, row 1", {"text": "c"}]]],
        [parts, [["lab/parts, row 1", {"text": "c"}]]],
    ]
    assert ask(hub, folder, *questions, HF_HUB_OFFLINE="1") == found


def test_what_the_hub_does_not_have_is_refused(hub: FakeHub, folder: Path) -> None:
    unknown, split, subset, none, revision = ask(
        hub,
        folder,
        ("lab/nothing", TRAIN, {}),
        ("lab/plain:trian", TRAIN, {}),
        ("lab/parts", TRAIN, {"subset": "smal"}),
        ("lab/parts", TRAIN, {}),
        ("lab/plain", TRAIN, {"revision": "v9"}),
    )
    start = f"Data not found: 'lab/nothing' is not a file or folder in {folder}, and the hub request failed: "
    assert unknown.startswith(start)
    assert split == "Hub data set lab/plain has no split trian, only train, test. Name one, as in lab/plain:train."
    assert (
        subset
        == "Cannot load hub data set lab/parts: it has no subset 'smal'. Did you mean 'small'? Existing: main, small."
    )
    assert none == (
        "Cannot load hub data set lab/parts: it has several subsets; choose one with data.subset. Existing: main, small."
    )
    assert "v9" in revision


def test_a_data_set_that_cannot_be_read_is_refused(hub: FakeHub, folder: Path) -> None:
    [message] = ask(hub, folder, ("lab/broken", TRAIN, {}))
    assert message.startswith("Cannot read lab/broken: ") and message.endswith(". Write it again, or name another one.")
