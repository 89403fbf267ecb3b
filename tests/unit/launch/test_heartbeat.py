"""When a rank gives a sign of progress, and what its sign says."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerControl, TrainerState

from shardmake.run.attempt import AttemptDir, Heartbeat
from shardmake.train import callbacks
from shardmake.train.callbacks import HeartbeatCallback, MetricsCallback
from shardmake.train.loop import Loop

ARGUMENTS: Any = None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that a test sets."""
    clock = SimpleNamespace(now=1000.0)
    for name in ("time", "monotonic"):
        monkeypatch.setattr(callbacks.time, name, lambda: clock.now)
    return clock


def fill_up(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def last(heartbeat: HeartbeatCallback) -> Heartbeat:
    beat = heartbeat.folder.beat(heartbeat.rank)
    assert beat
    return beat


def test_the_first_step_is_the_usual_one_until_there_are_others(tmp_path: Path, clock: Any) -> None:
    heartbeat, state, control = HeartbeatCallback(AttemptDir(tmp_path), 0), TrainerState(), TrainerControl()
    heartbeat.on_train_begin(ARGUMENTS, state, control)
    assert (last(heartbeat).phase, last(heartbeat).median_step_seconds) == ("first step", 0)
    for seconds, usual in ((700, 700), (400, 400), (500, 450)):
        clock.now += seconds
        heartbeat.on_step_end(ARGUMENTS, state, control)
        assert (last(heartbeat).phase, last(heartbeat).median_step_seconds) == ("train", usual)


def test_a_full_disk_does_not_end_training(
    tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heartbeat, metrics = HeartbeatCallback(AttemptDir(tmp_path), 0), MetricsCallback(tmp_path / "metrics.jsonl", 64, 1)
    state, control = TrainerState(is_world_process_zero=True), TrainerControl()

    def step() -> None:
        clock.now += 5
        state.global_step += 1
        heartbeat.on_step_end(ARGUMENTS, state, control)
        metrics.on_log(ARGUMENTS, state, control, logs={"loss": 1.0})

    step()
    with monkeypatch.context() as full:
        full.setattr(Path, "open", fill_up)
        full.setattr(callbacks, "write_heartbeat", fill_up)
        step()
        step()
    step()
    steps = [json.loads(line)["step"] for line in metrics.path.read_text().splitlines()]
    assert (steps, last(heartbeat).step) == ([1, 4], 4)
    assert capsys.readouterr().out.count("No space left on device") == 2, "each told once"


class Signs:
    """Notes which hooks are called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda args, state, control: self.called.append(name)


def make_loop(signs: Signs) -> Loop:
    """A loop around one weight, which needs no data but its batches."""

    class Model(torch.nn.Linear):
        def forward(self, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> Any:
            return SimpleNamespace(loss=super().forward(labels).sum() / num_items_in_batch)

    loop = Loop.__new__(Loop)
    loop.accelerator, loop.model, loop.watching = Accelerator(cpu=True), Model(3, 1), signs
    loop.optimizer = torch.optim.SGD(loop.model.parameters())
    loop.arguments = SimpleNamespace(max_grad_norm=1.0, eval_batch_size=1)
    loop.guard = SimpleNamespace(see_loss=lambda loss: None, see_norm=lambda norm: None)
    loop.state, loop.control, loop.losses = None, None, []
    return loop


def test_the_plain_loop_gives_a_sign_after_each_pass() -> None:
    signs = Signs()
    loop, batch = make_loop(signs), {"labels": torch.ones(1, 3)}
    loop.step([batch] * 3)
    assert signs.called == ["on_substep_end"] * 2, "the step's end is told by who takes the step"
    signs.called.clear()
    loop.eval_batches = [batch] * 2
    loop.evaluate()
    assert signs.called == ["on_prediction_step"] * 2
