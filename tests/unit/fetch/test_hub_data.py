"""Data sets of a hub: the same rows as from its files, splits, subsets, and what is said when there is none."""

import json
import os
import subprocess
import sys
import tempfile
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
from shardmake.core.errors import ShardmakeError
from shardmake.core.hub import commit_of, connect
from shardmake.data.sources import FIRST_ROWS, first_rows, locate, locate_named
from shardmake.fetch.hub_data import write_split

for number, (name, splits, data) in enumerate(json.loads(sys.argv[1])):
    folder = Path(sys.argv[2], str(number))
    folder.mkdir(parents=True)
    (folder / ".source.json").write_text("{}")
    try:
        source = locate_named(name, Data(train=name, **data), splits)
        write_split(source, commit_of(connect(), source.repository, source.revision, kind="dataset"), folder)
        files = locate(str(folder), Data(train=name), splits)
        print(json.dumps([[row.place.removeprefix(f"{folder}/"), row.example] for row in first_rows(files, FIRST_ROWS)]))
    except ShardmakeError as error:
        print(json.dumps(str(error)))
"""


def card(*subsets: str) -> bytes:
    return f"---\nconfigs:{''.join(SUBSET.format(name=name) for name in subsets)}\n---\n".encode()


def lines(*examples: Any) -> bytes:
    return "".join(json.dumps(example) + "\n" for example in examples).encode()


def rows(*texts: str) -> bytes:
    return lines(*({"text": text} for text in texts))


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "note": None}}}
UNEQUAL = [
    {"messages": [{"role": "user", "content": f"Hi {i}"}, {"role": "assistant", "content": "hello", "weight": 1}]}
    for i in range(3)
]
CALLS = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [CALL]}]}]
DATES = [{"prompt": "On which day?", "completion": f"2024-01-0{day}"} for day in (1, 2, 3)]
ZONES = [{"text": "2024-01-01T10:00:00+02:00"}]
TYPES = [{"prompt": "?", "completion": 7}, {"prompt": "?", "completion": "seven"}]
AS_WRITTEN: dict[str, list[Any]] = {"unequal": UNEQUAL, "calls": CALLS, "dates": DATES, "zones": ZONES, "types": TYPES}
SEMICOLONS = b"---\nconfigs:\n- config_name: default\n  data_files: a.csv\n  sep: ';'\n---\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[FakeHub]:
    with FakeHub(folder / "hub") as hub:
        files = {"train.jsonl": rows("a", "b"), "test.jsonl": rows("c")}
        hub.add("datasets/lab/plain", {"README.md": card("default"), **files})
        hub.add("datasets/lab/parts", {"README.md": card("main", "small"), **files})
        for name, examples in AS_WRITTEN.items():
            hub.add(f"datasets/lab/{name}", {"train.jsonl": lines(*examples)})
        hub.add("datasets/lab/cells", {"data/train.csv": b"text\nNA\n007\n", "data/test.csv": b"text\nx\n"})
        hub.add("datasets/lab/semicolons", {"README.md": SEMICOLONS, "a.csv": b"prompt;completion\na;b\n"})
        hub.add("datasets/lab/lines", {"train.txt": b"one\ntwo\n"})
        hub.add("datasets/lab/broken", {"README.md": SEMICOLONS, "a.csv": b"a;b\n1;2\n3;4;5\n"})
        yield hub


def ask(hub: FakeHub, folder: Path, *questions: tuple[str, tuple[str, ...], dict[str, str]]) -> list[Any]:
    """Return what a fresh process finds for each name, splits and settings."""
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(questions), tempfile.mkdtemp(dir=folder)], cwd=folder,
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "PYTHONPATH": PACKAGE},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


TRAIN, EVAL = ("train",), ("validation", "test")


def test_each_split_and_subset_has_its_own_rows_as_they_are_in_the_files(hub: FakeHub, folder: Path) -> None:
    expected: list[tuple[tuple[str, tuple[str, ...], dict[str, str]], str, list[Any]]] = [
        (("lab/plain", TRAIN, {}), "train.jsonl, line", [{"text": "a"}, {"text": "b"}]),
        (("lab/plain", EVAL, {"revision": "main"}), "test.jsonl, line", [{"text": "c"}]),
        (("lab/plain:test", TRAIN, {}), "test.jsonl, line", [{"text": "c"}]),
        (("lab/parts", EVAL, {"subset": "main"}), "test.jsonl, line", [{"text": "c"}]),
        (("lab/semicolons", TRAIN, {}), "train.parquet, row", [{"prompt": "a", "completion": "b"}]),
        (("lab/lines", TRAIN, {}), "train.parquet, row", [{"text": "one"}, {"text": "two"}]),
        *(((f"lab/{name}", TRAIN, {}), "train.jsonl, line", found) for name, found in AS_WRITTEN.items()),
    ]
    answers = ask(hub, folder, *(question for question, _, _ in expected))
    for (question, place, found), answer in zip(expected, answers, strict=True):
        assert answer == [[f"{place} {number}", row] for number, row in enumerate(found, start=1)], question
    [cells] = ask(hub, folder, ("lab/cells", TRAIN, {}))
    assert cells == [["data/train.csv, line 2", {"text": "NA"}], ["data/train.csv, line 3", {"text": "007"}]]


def test_what_the_hub_does_not_have_or_cannot_be_read_is_refused(hub: FakeHub, folder: Path) -> None:
    named = {"lab/plain:trian": {}, "lab/parts": {"subset": "smal"}, "lab/broken": {}}
    questions = [(name, TRAIN, settings) for name, settings in named.items()]
    split, subset, broken, none = ask(hub, folder, *questions, ("lab/parts", TRAIN, {}))
    assert split == "Hub data set lab/plain has no split trian, only train, test. Name one, as in lab/plain:train."
    start = "Cannot load hub data set lab/parts: it "
    assert subset == f"{start}has no subset 'smal'. Did you mean 'small'? Existing: main, small."
    assert none == f"{start}has several subsets; choose one with data.subset. Existing: main, small."
    assert broken.startswith("Cannot read hub data set lab/broken: ") and broken.endswith(". Name another one.")
