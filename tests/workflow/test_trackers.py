"""What experiment trackers keep of a training in two attempts on a node without internet, read back from their files."""

import json
import os
import shutil
import socket
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmake.config.models import Strategy
from shardmake.run.paths import RunDir
from tests.workflow.by_hand import launch_by_hand
from tests.workflow.checkout import Checkout
from tests.workflow.forked import Forked, log

pytestmark = pytest.mark.training
SECRETS = {
    "HF_TOKEN": "hf_Wq3TfEaYk2MdL9xPzRbNcUvHs",
    "AWS_SECRET_ACCESS_KEY": "x7Kq/2mPZ0aV+planted",
    "WANDB_API_KEY": "9f8e7d6c5b" * 4,
}


def test_attempts_are_one_run_in_mlflow(forked: Forked, tmp_path: Path) -> None:
    """The second attempt has other parameters (its DeepSpeed file), which MLflow does not let a run change."""
    rundir = RunDir(tmp_path / "run")
    planned = forked.plan("zero1", 2, report_to=["mlflow"], checkpoints={"every_steps": 2})
    assert forked.train(rundir, planned) == [0, 0], log(rundir)
    shutil.rmtree(rundir.checkpoints / "checkpoint-4")
    codes, _ = forked.resume(rundir, planned)
    assert codes == [0, 0], log(rundir)
    (told,) = (rundir.train / "mlflow").glob("*/*/metrics/loss")
    assert [int(line.split()[2]) for line in told.read_text().splitlines()] == [1, 2, 3, 4, 3, 4]
    assert (told.parents[1] / "params/learning_rate").read_text() == "0.002"
    assert "status: 3" in (told.parents[1] / "meta.yaml").read_text(), "finished"


@pytest.fixture
def two_attempts(lab: Checkout, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A training told to W&B and trackio, cut after the second of four steps."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    shutil.rmtree(lab.run / "train", ignore_errors=True)
    changes = {"report_to": ["wandb", "trackio"], "checkpoints": {"every_steps": 2}}
    strategy: Strategy = "ddp"
    launch_by_hand(lab, strategy, **changes)
    rundir = RunDir(lab.run)
    shutil.rmtree(rundir.checkpoints / "checkpoint-4")
    launch_by_hand(lab, strategy, resume_from=rundir.checkpoints / "checkpoint-2", **changes)
    return rundir


@pytest.mark.trackers
def test_wandb_and_trackio_go_on_with_one_run(two_attempts: RunDir) -> None:
    files = sorted((two_attempts.train / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1, "one id, which `wandb sync` joins them by"
    first, second = (list(wandb_records(file)) for file in files)
    assert [steps(first), steps(second)] == [[1, 2, 3, 4, 4], [3, 4, 4]], "the last one sums the training up"
    for records in (first, second):
        (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        assert (run.project, run.display_name, run.host) == ("shardmake", two_attempts.name, "cluster")
        assert [record for record in records if record.WhichOneof("record_type") == "exit"], "closed, not cut off"

    (database,) = (two_attempts.train / "trackio").glob("*.db")
    assert database.stem == "shardmake"
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, metrics from metrics order by id").fetchall()
    told = [json.loads(metrics) for _, metrics in rows]
    assert {name for name, _ in rows} == {two_attempts.name}
    assert [line["train/global_step"] for line in told if "train/loss" in line] == [1, 2, 3, 4, 3, 4]
    assert_nothing_private(two_attempts.train)


def assert_nothing_private(folder: Path) -> None:
    """No secret anywhere; the machine's name not in what goes to W&B's server."""
    told = {path: path.read_bytes() for tracker in ("wandb", "trackio") for path in (folder / tracker).rglob("*.*")}
    assert [path for path, text in told.items() for value in SECRETS.values() if value.encode() in text] == []
    names = [f'"{socket.gethostname()}"', os.environ.get("USER", "nobody in particular")]
    sent = [text for path, text in told.items() if path.suffix == ".wandb"]
    assert [name for name in names for text in sent if name.encode() in text] == []


def wandb_records(path: Path) -> "Iterator[object]":
    """The records of a W&B file: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if 0 < (left := -position % 32768) < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def steps(records: list[object]) -> list[int]:
    """The optimizer steps that were told, in order."""
    told = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    return [
        int(item.value_json)
        for line in told
        for item in line.item
        if "train/global_step" in (item.key, *item.nested_key)
    ]
