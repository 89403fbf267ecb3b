"""Files of experiment trackers after a training in two attempts on a node without internet access."""

import json
import os
import shutil
import socket
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmake.run.paths import RunDir
from tests.workflow.by_hand import launch_by_hand
from tests.workflow.checkout import Checkout
from tests.workflow.conftest import SECRETS

pytestmark = pytest.mark.training


@pytest.mark.trackers
@pytest.mark.usefixtures("secrets")
def test_wandb_and_trackio_continue_one_run(shared_checkout: Checkout) -> None:
    """The training is interrupted after the second of four steps."""
    rundir = RunDir(shared_checkout.run)
    shutil.rmtree(rundir.train, ignore_errors=True)
    changes = {"report_to": ["wandb", "trackio"], "checkpoints": {"every_steps": 2}}
    launch_by_hand(shared_checkout, "ddp", **changes)
    shutil.rmtree(rundir.checkpoints / "checkpoint-4")
    launch_by_hand(shared_checkout, "ddp", resume_from=rundir.checkpoints / "checkpoint-2", **changes)

    files = sorted((rundir.train / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1, "one id, which `wandb sync` joins them by"
    first, second = (list(wandb_records(file)) for file in files)
    assert [steps(first), steps(second)] == [[1, 2, 3, 4, 4], [3, 4, 4]], "the last record is a summary"
    for records in (first, second):
        (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        assert (run.project, run.display_name, run.host) == ("shardmake", rundir.name, "cluster")
        assert [record for record in records if record.WhichOneof("record_type") == "exit"], "the run is closed"

    (database,) = (rundir.train / "trackio").glob("*.db")
    assert database.stem == "shardmake"
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, metrics from metrics order by id").fetchall()
    lines = [json.loads(metrics) for _, metrics in rows]
    assert {name for name, _ in rows} == {rundir.name}
    assert [line["train/global_step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4, 3, 4]
    assert_nothing_private(rundir.train)


def assert_nothing_private(folder: Path) -> None:
    """Check that no file has a secret, and that what W&B sends to its server does not name the machine."""
    contents = {path: path.read_bytes() for tracker in ("wandb", "trackio") for path in (folder / tracker).rglob("*.*")}
    assert [path for path, text in contents.items() for value in SECRETS.values() if value.encode() in text] == []
    names = [f'"{socket.gethostname()}"', os.environ.get("USER", "unknown user")]
    sent = [text for path, text in contents.items() if path.suffix == ".wandb"]
    assert [name for name in names for text in sent if name.encode() in text] == []


def wandb_records(path: Path) -> "Iterator[object]":
    """Yield the records of a W&B file: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if 0 < (left := -position % 32768) < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a complete record, or its last part
            yield Record.FromString(parts)
            parts = b""


def steps(records: list[object]) -> list[int]:
    history = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    return [
        int(item.value_json)
        for line in history
        for item in line.item
        if "train/global_step" in (item.key, *item.nested_key)
    ]
