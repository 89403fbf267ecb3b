"""A rank's heartbeats: their times and their content."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerControl, TrainerState

from shardmake.run.attempt import AttemptDir, Heartbeat, heartbeat_file
from shardmake.train.callbacks import heartbeat as heartbeat_module
from shardmake.train.callbacks.heartbeat import HeartbeatCallback
from shardmake.train.callbacks.metrics import MetricsCallback
from shardmake.train.loop import Loop

ARGUMENTS: Any = None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that the test sets."""
    clock = SimpleNamespace(now=1000.0)
    for name in ("time", "monotonic"):
        monkeypatch.setattr(heartbeat_module.time, name, lambda: clock.now)
    return clock


def fill_up(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


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
    with monkeypatch.context() as full:
        full.setattr(Path, "open", fill_up)
        full.setattr(heartbeat_module, "write_heartbeat", fill_up)
        step()
        step()
    step()
    steps = [json.loads(line)["step"] for line in metrics.path.read_text().splitlines()]
    assert (steps, last(heartbeat).step) == ([1, 4], 4)
    assert caplog.text.count("No space left on device") == 2, "each writer reports once"


class HookRecorder:
    """A callback handler that records which hooks are called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda args, state, control: self.called.append(name)


def make_loop(hooks: HookRecorder) -> Loop:
    """Return a loop around one linear layer that needs only its batches."""

    class Model(torch.nn.Linear):
        def forward(self, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> Any:
            return SimpleNamespace(loss=super().forward(labels).sum() / num_items_in_batch)

    loop = Loop.__new__(Loop)
    loop.accelerator, loop.model, loop.callbacks = Accelerator(cpu=True), Model(3, 1), hooks
    loop.optimizer = torch.optim.SGD(loop.model.parameters())
    loop.arguments = SimpleNamespace(max_grad_norm=1.0, eval_batch_size=1, use_liger_kernel=False)
    loop.non_finite = SimpleNamespace(add_loss=lambda loss: None, set_norm=lambda norm: None)
    loop.state, loop.control, loop.loss_sum = None, None, torch.zeros(())
    return loop


def test_plain_loop_calls_a_hook_after_each_pass() -> None:
    hooks = HookRecorder()
    loop, batch = make_loop(hooks), {"labels": torch.ones(1, 3)}
    loop.step([batch] * 3)
    assert hooks.called == ["on_substep_end"] * 2, "Loop.run calls the hook of the step's end"
    hooks.called.clear()
    loop.eval_batches = [batch] * 2
    loop.evaluate()
    assert hooks.called == ["on_prediction_step"] * 2


@pytest.mark.parametrize("liger", [False, True])
def test_plain_loop_evaluates_without_logits_under_the_fused_loss(liger: bool) -> None:
    """Liger's forward outside training returns the logits of all positions, which the plan does not count."""
    loop, given = make_loop(HookRecorder()), []

    def model(**inputs: Any) -> Any:
        given.append(inputs.get("skip_logits", False))
        return SimpleNamespace(loss=torch.ones(()))

    loop.arguments.use_liger_kernel = liger
    loop.model = type("Model", (), {"eval": lambda self: None, "__call__": lambda self, **inputs: model(**inputs)})()
    loop.eval_batches = [{"labels": torch.ones(1, 3)}]
    assert loop.evaluate() == 1.0
    assert given == [liger]
