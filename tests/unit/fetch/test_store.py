"""Models and data are fetched from URLs as from the hub: pinned, whole, and with advice where that fails."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3fs

from shardmake.config.inputs import check_inputs, local_files
from shardmake.core.errors import ShardmakeError
from shardmake.fetch import store
from shardmake.fetch.stage import fetch
from shardmake.run.paths import RunDir
from shardmake.run.receipts import WeightsReceipt
from shardmake.run.sources import localize, missing_files
from tests.finished_run import make_run

MODEL = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights", "optimizer.pt": b"other"}
ROWS = b'{"text": "one"}\n{"text": "two"}\n'


@pytest.fixture
def bucket(bucket: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The bucket with a model and data, and an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    for name, content in MODEL.items():
        bucket.put_object(Key=f"base/{name}", Body=content)
    for name in ("a.jsonl", "b.jsonl", "README.md", ".hidden.jsonl"):
        bucket.put_object(Key=f"talk/{name}", Body=ROWS)
    return bucket


RUN = make_run(model="s3://lab/base", data={"train": "s3://lab/talk", "eval": "s3://lab/talk/a.jsonl"})


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs/chat")


def test_config_and_data_come_first_and_the_weights_after_the_plan(bucket: Any, rundir: RunDir) -> None:
    sources = fetch(RUN, rundir, "description")
    assert missing_files(sources.model) == ["model.safetensors"] and "optimizer.pt" not in sources.model.files
    assert [sorted(source.files) for source in sources.train] == [["a.jsonl", "b.jsonl"]]
    local = localize(RUN, rundir)
    assert Path(str(local.data.eval), "a.jsonl").read_bytes() == ROWS
    assert sorted(path.name for path in Path(str(local.data.train)).iterdir()) == ["a.jsonl", "b.jsonl"]
    raw = RUN.model_copy(update={"script": "train.py", "data": RUN.data.model_copy(update={"format": "raw"})})
    found = fetch(raw, rundir.sibling("raw"), "description")
    assert [sorted(source.files) for source in found.train] == [["README.md", "a.jsonl", "b.jsonl"]]
    assert [list(source.files) for source in found.eval] == [["a.jsonl"]]
    fetch(RUN, rundir, "weights")
    assert (Path(local.model) / "model.safetensors").read_bytes() == b"weights"
    assert all(len(record.sha256) == 64 for record in WeightsReceipt.read(rundir.weights_receipt).files.values())


def test_a_fetched_run_keeps_its_files_when_the_store_changes(bucket: Any, rundir: RunDir) -> None:
    first = fetch(RUN, rundir)
    bucket.put_object(Key="talk/a.jsonl", Body=ROWS * 2)
    bucket.put_object(Key="base/model.safetensors", Body=b"others!")
    assert fetch(RUN, rundir) == first and (Path(first.model.path) / "model.safetensors").read_bytes() == b"weights"
    rundir.sources.unlink()
    second = fetch(RUN, rundir)
    assert (Path(second.model.path) / "model.safetensors").read_bytes() == b"others!"
    assert second.model.path != first.model.path and second.train[0].listing != first.train[0].listing


def test_weights_that_changed_after_the_plan_are_refused(bucket: Any, rundir: RunDir) -> None:
    fetch(RUN, rundir, "description")
    bucket.put_object(Key="base/model.safetensors", Body=b"others!")
    with pytest.raises(ShardmakeError, match=r"^s3://lab/base has changed since .* remove the run's sources\.json"):
        fetch(RUN, rundir, "weights")


def test_an_interrupted_copy_is_not_a_file(bucket: Any, rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupt(self: Any, path: str, target: str, **_: Any) -> None:
        Path(target).write_bytes(b"wei")

    fetch(RUN, rundir, "description")
    with monkeypatch.context() as patch, pytest.raises(ShardmakeError, match=r"arrived with 3 of 7 bytes\n.*again"):
        patch.setattr("s3fs.S3FileSystem._get_file", interrupt)
        s3fs.S3FileSystem.clear_instance_cache()
        fetch(RUN, rundir, "weights")
    s3fs.S3FileSystem.clear_instance_cache()
    fetch(RUN, rundir, "weights")
    assert not any(path.name.startswith(".partial") for path in Path(fetch(RUN, rundir).model.path).iterdir())


MISSING: list[tuple[dict[str, Any], str]] = [
    ({"model": "s3://lab/talk"}, "No model at s3://lab/talk: there is no config.json"),
    ({"model": "s3://lab/nothing"}, "No model at s3://lab/nothing"),
    ({"data": {"train": "s3://lab/pictures"}}, r"No data at s3://lab/pictures: .*Use \.jsonl"),
    ({"data": {"train": "s3://elsewhere/talk"}}, "(?s)Fetching s3://elsewhere/talk failed: .*Check the URL"),
]


def test_what_is_not_there_is_named(bucket: Any, rundir: RunDir) -> None:
    bucket.put_object(Key="pictures/one.png", Body=b"")
    for changes, words in MISSING:
        with pytest.raises(ShardmakeError, match=words):
            fetch(make_run(**{"model": "s3://lab/base", "data": {"train": "s3://lab/talk"}} | changes), rundir)


def test_any_file_system_of_fsspec_serves(bucket: Any, rundir: RunDir) -> None:
    files = fsspec.filesystem("memory")
    files.pipe({"/lab/rows.jsonl": ROWS})
    source = store.fetch_data("memory://lab/rows.jsonl")
    assert json.loads((Path(source.path) / "rows.jsonl").read_text().splitlines()[1]) == {"text": "two"}


@pytest.mark.parametrize(("changes", "words"), [
    ({"model": "s4://lab/base"}, r"^runs\.chat\.model: s4://lab/base cannot be fetched: fsspec does not know the"),
    ({"data": {"train": "https://me:word@host/x.jsonl"}}, r"data\.train: https://host/x\.jsonl is written with a"),
    ({"model": "s3://lab/base", "revision": "main"}, r"runs\.chat\.revision: a URL has no revisions"),
])  # fmt: skip
def test_urls_that_cannot_work_are_refused_with_the_configuration(changes: dict[str, Any], words: str) -> None:
    run = make_run(**{"model": "s3://lab/base", "data": {"train": "s3://lab/talk"}} | changes)
    with pytest.raises(ShardmakeError, match=words):
        check_inputs("chat", run)
    assert local_files(run, "model", "data") == []
