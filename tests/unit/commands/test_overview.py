"""The table of all runs: `shardmake status` without a name, and `shardmake list`."""

import json
import os
import subprocess
import time
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest

from shardmake.commands import status
from shardmake.commands.listing import list_runs
from shardmake.commands.status import cells, last_event, read_state, read_states
from shardmake.config.load import parse_config
from shardmake.core.errors import ConfigError
from shardmake.core.tables import plain_table
from shardmake.launch import slurm_jobs
from shardmake.launch.jobs import job_name
from shardmake.launch.slurm_states import parse_rows
from shardmake.launch.submission_check import parse_start
from shardmake.run.attempt import AttemptDir, Heartbeat, SubmittedJob
from shardmake.run.paths import RunDir
from shardmake.run.state import DriverJobStatus, RunState, read_progress
from tests.finished_run import make_run, make_rundir, publish_heartbeat
from tests.unit.plans import make_cluster

SLURM = make_cluster(executor="slurm")
START = "2026-11-23T14:30:00"


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with job 12."""
    monkeypatch.chdir(tmp_path)
    rundir = make_rundir(tmp_path)
    rundir.train_receipt.unlink()
    SubmittedJob(id="12", attempt=2, submitted=time.time()).write(rundir.job)
    return rundir


def test_a_pending_job_has_its_reason_and_estimated_start(training: RunDir) -> None:
    queue = parse_rows(f"12|PENDING|(Priority)|{job_name(training.root)}|{START}\n")
    row = read_state(make_run(), SLURM, training, queue)
    assert (row.stage, row.state, row.queue) == ("train", "waits in the queue", "pending (Priority)")
    assert row.expected_start == datetime.fromisoformat(START).timestamp() and cells(row)[-2] == "2026-11-23 14:30"
    assert parse_start("N/A") is None and parse_start("") is None


def test_a_row_has_progress_for_people_and_for_programs(training: RunDir) -> None:
    publish_heartbeat(AttemptDir(training.attempts / "002"), "train", 45, median_step_seconds=2.0)
    queue = parse_rows(f"12|RUNNING|c[1-2]|{job_name(training.root)}|{START}\n")
    row = read_state(make_run(), SLURM, training, queue)
    assert cells(row)[1:8] == ["train", "training", "60/60", "0.15", "205", "0 s", "running c[1-2]"]
    driver = DriverJobStatus(job="14", state="running", nodes="c3", log="runs/.driver/001/driver.log")
    read = json.loads(json.dumps(row.model_copy(update={"driver_job": driver}).as_json()))
    assert read["driver_job"] == {"job": "14", "state": "running", "nodes": "c3", "log": "runs/.driver/001/driver.log"}
    assert read["step"] == 60 and read["total"] == 60 and read["seconds_left"] == 0 and read["step_seconds"] == 2
    assert read["stages"]["evaluate"] == "outdated" and read["last_event"]["text"] == "job 12 submitted"


def test_time_left_is_unknown_without_a_total_or_a_speed(tmp_path: Path) -> None:
    beat = Heartbeat(rank=0, host="c1", pid=1, phase="train", step=3, time=0.0, median_step_seconds=0.0)
    assert read_progress(make_rundir(tmp_path), beat)["seconds_left"] is None
    found = read_progress(RunDir(tmp_path / "none"), beat.model_copy(update={"median_step_seconds": 1.0}))
    assert found["step_seconds"] == 1 and found["total"] is None and found["seconds_left"] is None
    assert RunState(run="chat", state="training", step=3).progress() == "step 3"
    row = RunState(run="chat", state="cannot be read: no permission").as_json()
    assert row["driver_job"] is None and row["step"] is None and RunState.model_validate(row).run == "chat"


def test_the_last_event_is_the_newest_record(training: RunDir) -> None:
    assert str(last_event(training)) == "job 12 submitted, 0 s ago"
    training.stop_file.touch()
    os.utime(training.stop_file, (time.time() + 60, time.time() + 60))
    event = last_event(training)
    assert event and event.text == "stop requested"
    training.job.unlink()
    training.stop_file.unlink()
    event = last_event(training)
    assert event and event.text == "attempt 2 ended: finished" and event.time == 2100
    assert last_event(RunDir(Path("runs/none"))) is None


def test_a_plain_table_is_complete_and_leaves_out_empty_columns() -> None:
    assert plain_table(("run", "queue", "state"), [("a", "", "x" * 300), ("long", "", "y")]) == (
        f"run   state\na     {'x' * 300}\nlong  y"
    )


def test_one_squeue_for_all_runs(training: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run_slurm(*command: str) -> "subprocess.CompletedProcess[str]":
        asked.extend(word for word in command if word.startswith("--name"))
        return subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.setattr(slurm_jobs, "run_slurm", run_slurm)
    config = parse_config({"cluster": "c", "runs": dict.fromkeys(("chat", "b"), RUN)}, "test")
    rows = read_states(config, SLURM, Path("runs"))
    assert asked == [f"--name={job_name(training.root)}"] and [row.state for row in rows][1] == "not started"


RUN = make_run().model_dump(exclude_unset=True)


def test_the_list_has_sweeps_and_folders_of_other_runs(training: RunDir) -> None:
    (training.root.parent / "old").mkdir()
    (training.root.parent / ".locks").mkdir()
    mixed = {"train": [{"source": "a.jsonl"}, {"source": "lab/b"}]}
    runs = {"chat": RUN, "mixed": RUN | {"data": mixed}, "grid": RUN | {"sweep": {"seed": [1, 2]}}}
    found = list_runs(parse_config({"cluster": "c", "runs": runs}, "test"), make_cluster(), Path("runs"))
    assert [run.size is not None and run.owner != "" for run in found] == [True, False, False, False, True]
    assert [tuple(run.cells()[:5]) for run in found] == [
        ("chat", "", "lab/base", "resources/demo/train.jsonl", "fetch"),
        ("mixed", "", "lab/base", "a.jsonl, lab/b", "fetch"),
        ("grid-s1", "grid", "lab/base", "resources/demo/train.jsonl", "fetch"),
        ("grid-s2", "grid", "lab/base", "resources/demo/train.jsonl", "fetch"),
        ("old", "", "", "", "not in the configuration"),
    ]


def test_watch_ends_with_an_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"^--watch cannot be used: the output is not a terminal\."):
        status.watch(lambda: [])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("time.sleep", Mock(side_effect=KeyboardInterrupt))
    status.watch(lambda: [RunState(run="chat", stage="train", state="training")])
    assert "chat" in capsys.readouterr().out
