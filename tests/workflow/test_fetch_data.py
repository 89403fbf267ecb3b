"""Fetching a data set from a hub, in a process of its own: `datasets` reads the hub's address when it is imported."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from shardmake.config.models import Data
from shardmake.core.manifest import record
from shardmake.data.files import open_row, raw_rows
from shardmake.data.sources import ONE_SPLIT, TRAIN_SPLITS, identity_of_raw, link_raw, locate
from shardmake.run.paths import RunDir
from shardmake.run.sources import PinnedSource, Sources, localize
from tests.finished_run import make_run
from tests.hub import READER, FakeHub

SCRIPT = """
import json, sys
from pathlib import Path
from shardmake.config.models import Run
from shardmake.core.errors import ShardmakeError
from shardmake.core.log import configure_logging
from shardmake.fetch.stage import fetch
from shardmake.run.paths import RunDir
configure_logging()
try:
    fetch(Run.model_validate(json.loads(sys.argv[1])), RunDir(Path("runs", sys.argv[2])))
except ShardmakeError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    (tmp_path / "base").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "base" / name).write_text("{}")
    with FakeHub(tmp_path / "hub") as server:
        yield server


def parquet(*texts: str) -> bytes:
    buffer = io.BytesIO()
    datasets.Dataset.from_dict({"text": list(texts)}).to_parquet(buffer)
    return buffer.getvalue()


def talk(*texts: str) -> dict[str, bytes]:
    """Return the files of a data set with two splits."""
    return {"data/train-0.parquet": parquet(*(texts or ("a", "b"))), "data/validation-0.parquet": parquet("c")}


TALK = {"model": "base", "data": {"train": "lab/talk", "eval": "lab/talk"}}


def run_fetch(
    hub: FakeHub, folder: Path, name: str = "chat", settings: dict[str, Any] = TALK, **environment: str
) -> subprocess.CompletedProcess[str]:
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_TOKEN": READER, **environment}
    command = [sys.executable, "-c", SCRIPT, make_run(**settings).model_dump_json(), name]
    return subprocess.run(command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True)


def test_splits_come_pinned_to_the_commit_and_stay_offline(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.add("datasets/lab/talk", talk())
    done = run_fetch(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    rundir = RunDir(tmp_path / "runs" / "chat")
    sources = Sources.model_validate_json(rundir.sources.read_text())
    assert [one.commit for one in (*sources.train, *sources.eval)] == [commit, commit]
    run = localize(make_run(**TALK), rundir)
    assert texts(tmp_path / run.data.train) == ["a", "b"]
    assert texts(tmp_path / str(run.data.eval)) == ["c"]
    hub.requests.clear()
    assert run_fetch(hub, tmp_path, HF_HUB_OFFLINE="1").returncode == 0
    assert not hub.requests


def test_runs_with_the_same_data_set_share_its_files(hub: FakeHub, tmp_path: Path) -> None:
    """A newer commit for one of them leaves the other's file as it is; a damaged file or record is not taken."""
    hub.add("datasets/lab/talk", talk())
    for name in ("first", "second"):
        done = run_fetch(hub, tmp_path, name)
        assert done.returncode == 0, done.stderr
    assert "Took the data lab/talk of run first." in done.stdout and "Fetching data" not in done.stdout
    first, second = (tmp_path / "runs" / name / "fetched/train/data/train-0.parquet" for name in ("first", "second"))
    assert first.samefile(second)
    hub.add("datasets/lab/talk", talk("x"))
    (tmp_path / "runs/first/sources.json").unlink()
    assert run_fetch(hub, tmp_path, "first").returncode == 0
    assert (texts(first.parents[1]), texts(second.parents[1])) == (["x"], ["a", "b"])
    first.write_bytes(b"damaged")
    split = first.parents[1] / ONE_SPLIT
    source = PinnedSource.read(split)
    (notes := tmp_path / "notes").write_text("of somebody else")
    source.model_copy(update={"files": source.files | {"../../../../notes": record(notes)}}).write(split)
    assert "Fetching data lab/talk." in run_fetch(hub, tmp_path, "third").stdout
    assert texts(tmp_path / "runs/third/fetched/train") == ["x"]
    assert not (tmp_path / "runs/notes").exists(), "a name in another run's record leads nowhere"


PICTURES = {"pictures/1.png": b"\x89PNG", "labels.csv": b"1,cat\n", "README.md": b"# Cats\n"}


def test_raw_data_comes_whole_and_unchanged_from_one_commit_and_stays_offline(hub: FakeHub, tmp_path: Path) -> None:
    first = hub.add("datasets/lab/pictures", PICTURES)
    (tmp_path / "eval.jsonl").write_text('{"text": "a cat"}\n')
    data = {"train": "lab/pictures", "revision": first, "eval": "eval.jsonl", "format": "raw"}
    settings = {"model": "base", "script": "train.py", "data": data}
    assert hub.add("datasets/lab/pictures", PICTURES | {"labels.csv": b"1,dog\n"}) != first
    done = run_fetch(hub, tmp_path, settings=settings)
    assert done.returncode == 0, done.stderr
    rundir = RunDir(tmp_path / "runs" / "chat")
    (source,) = Sources.model_validate_json(rundir.sources.read_text()).train
    assert source.commit == first
    folder = tmp_path / localize(make_run(**settings), rundir).data.sources[0].source
    identity = identity_of_raw(folder)
    link_raw(folder, identity, rundir.raw_data)
    found = {file["path"]: (rundir.raw_data / file["path"]).read_bytes() for file in identity["files"]}
    assert found == PICTURES, "of the pinned commit, with names and bytes as they were"
    hub.requests.clear()
    assert run_fetch(hub, tmp_path, settings=settings, HF_HUB_OFFLINE="1").returncode == 0
    assert not hub.requests


def texts(folder: Path) -> list[str]:
    source = locate(str(folder), Data(train=str(folder)), TRAIN_SPLITS)
    return [row.example["text"] for row in map(open_row, raw_rows(source.paths))]
