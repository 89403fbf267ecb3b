"""A rank's heartbeats: their times and their content."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import TrainerControl, TrainerState

from shardmake.run.attempt import AttemptDir, Heartbeat, heartbeat_file
from shardmake.train.callbacks import heartbeat as heartbeat_module
from shardmake.train.callbacks.heartbeat import HeartbeatCallback
from shardmake.train.callbacks.metrics import MetricsCallback

ARGUMENTS: Any = None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that the test sets."""
    clock = SimpleNamespace(now=1000.0)
    for name in ("time", "monotonic"):
        monkeypatch.setattr(heartbeat_module.time, name, lambda: clock.now)
    return clock


def last(heartbeat: HeartbeatCallback) -> Heartbeat:
    beat = Heartbeat.read_if_exists(heartbeat_file(heartbeat.folder.heartbeats, heartbeat.rank))
    assert beat
    return beat


def test_first_step_counts_as_median_until_there_are_others(tmp_path: Path, clock: Any) -> None:
    heartbeat, state, control = HeartbeatCallback(AttemptDir(tmp_path), 0), TrainerState(), TrainerControl()
    heartbeat.on_train_begin(ARGUMENTS, state, control)
    assert (last(heartbeat).phase, last(heartbeat).median_step_seconds) == ("first step", 0)
    for seconds, expected in ((700, 700), (400, 400), (500, 450)):
        clock.now += seconds
        heartbeat.on_step_end(ARGUMENTS, state, control)
        assert (last(heartbeat).phase, last(heartbeat).median_step_seconds) == ("train", expected)


def test_full_disk_does_not_end_training(
    tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heartbeat, metrics = HeartbeatCallback(AttemptDir(tmp_path), 0), MetricsCallback(tmp_path / "metrics.jsonl", 64, 1)
    state, control = TrainerState(is_world_process_zero=True), TrainerControl()

    def step() -> None:
        clock.now += 5
        state.global_step += 1
        heartbeat.on_step_end(ARGUMENTS, state, control)
        metrics.on_log(ARGUMENTS, state, control, logs={"loss": 1.0})

    step()
    fill_up = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as full:
        full.setattr("shardmake.train.callbacks.metrics.open_file", fill_up)
        full.setattr(heartbeat_module, "write_heartbeat", fill_up)
        step()
        step()
    step()
    steps = [json.loads(line)["step"] for line in metrics.path.read_text().splitlines()]
    assert (steps, last(heartbeat).step) == ([1, 4], 4)
    assert caplog.text.count("No space left on device") == 2, "each writer reports once"
