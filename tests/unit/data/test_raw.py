"""Raw data is hashed and handed over unchanged; only the evaluation examples are tokenized."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.inputs import check_inputs, local_files
from shardmake.config.load import parse_config
from shardmake.config.models import Run
from shardmake.core.errors import DataError
from shardmake.data.check import check_first_rows, check_sources
from shardmake.data.stage import prepare, preview
from shardmake.run.paths import RunDir
from shardmake.run.receipts import DataReceipt
from shardmake.run.sources import check_raw
from tests.unit.config.samples import RUN
from tests.unit.data.test_stage import conversations, model, write_rows

__all__ = ["model"]

FILES = {"images/1.png": b"\x89PNG", "captions.tsv.old": b"one\tcat\n", "deep/er/index.bin": b"\x00" * 9}


def parse(**changes: Any) -> Run:
    values = {**RUN, "script": "train.py", **changes}
    return parse_config({"cluster": "c.yaml", "runs": {"chat": values}}, "c").runs["chat"]


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Run:
    for name, content in {**FILES, ".git/HEAD": b"ref"}.items():
        (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / name).write_bytes(content)
    (tmp_path / "train.py").touch()
    evaluated = write_rows(tmp_path / "eval.jsonl", conversations(8))
    data = {"train": str(tmp_path / "own"), "eval": evaluated, "format": "raw"}
    return parse(model=str(model), data=data, script=str(tmp_path / "train.py"), sequence_length=64)


def test_files_are_linked_hashed_and_noticed(run: Run, tmp_path: Path) -> None:
    check_inputs("chat", run)
    check_sources(run)
    check_first_rows(run)
    assert next(preview(run, 1, RunDir(tmp_path / "run"))).startswith(f"{tmp_path}/eval.jsonl, line 1")
    inputs = [Path(file) for file in local_files(run, "data")]
    assert sorted(inputs) == sorted([*(tmp_path / "own" / name for name in FILES), tmp_path / "eval.jsonl"])
    rundir = RunDir(tmp_path / "runs/chat")
    receipt = prepare(run, rundir)
    found = {path.relative_to(rundir.raw_data): path for path in rundir.raw_data.rglob("*") if path.is_file()}
    assert {str(name): path.read_bytes() for name, path in found.items()} == FILES
    digests = {file["path"]: file["sha256"] for file in receipt.sources["train"]["files"]}
    assert digests == {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    assert receipt.train.sequences == 0 and receipt.eval.examples == 8 and receipt.data_format == "chat"
    assert not (rundir.data / "train").exists()
    check_raw(rundir)
    (tmp_path / "own").rename(tmp_path / "moved")
    data = run.data.model_copy(update={"train": str(tmp_path / "moved")})
    assert prepare(run.model_copy(update={"data": data}), rundir) == receipt, "its links follow"
    check_raw(rundir)


def test_other_files_are_other_training_data(run: Run, tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "runs/chat")
    before = prepare(run, rundir)
    longer = parse(**run.model_dump(exclude_unset=True) | {"sequence_length": 32})
    assert prepare(longer, rundir).digest == before.digest, "the length concerns the evaluation examples only"
    image = tmp_path / "own/images/1.png"
    image.write_bytes(b"\x89PN")
    with pytest.raises(DataError, match=r"images/1\.png has 3 bytes instead of 4, .* shardmake data chat"):
        check_raw(rundir)
    assert prepare(run, rundir).digest != before.digest
    check_raw(rundir)
    image.unlink()
    with pytest.raises(DataError, match=r"images/1\.png is missing"):
        check_raw(rundir)
    prepare(run, rundir)
    assert not (rundir.raw_data / "images").exists()


def test_a_single_file_is_alone_in_its_folder_and_an_empty_folder_is_refused(run: Run, tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "runs/chat")
    data = run.data.model_copy(update={"train": str(tmp_path / "own/captions.tsv.old")})
    prepare(run.model_copy(update={"data": data}), rundir)
    assert [path.name for path in rundir.raw_data.iterdir()] == ["captions.tsv.old"]
    assert DataReceipt.read(rundir.data_receipt).sources["train"]["files"][0]["bytes"] == 8
    (tmp_path / "empty").mkdir()
    data = run.data.model_copy(update={"train": str(tmp_path / "empty")})
    for refuse in (check_sources, lambda one: prepare(one, rundir)):
        with pytest.raises(DataError, match=r"No data in .*empty: the folder has no file"):
            refuse(run.model_copy(update={"data": data}))
