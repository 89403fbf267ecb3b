"""Callbacks: heartbeats, losses that are not finite, recorded steps, saves, and those of a user's Trainer."""

import errno
import gzip
import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from shardmake.config.models import Profile
from shardmake.run.attempt import USER_SCRIPT_PHASE, AttemptDir, Heartbeat, RequestedStop, heartbeat_file
from shardmake.run.attempt_history import may_rewind
from shardmake.run.paths import RunDir
from shardmake.run.training_settings import Retention, ScriptProgram
from shardmake.run.usage import WINDOW_STEPS, WINDOWS
from shardmake.train.callbacks import heartbeat as heartbeat_module
from shardmake.train.callbacks.heartbeat import ComputeTimer, HeartbeatCallback
from shardmake.train.callbacks.metrics import MetricsCallback
from shardmake.train.callbacks.non_finite import NonFiniteCheck, NonFiniteError
from shardmake.train.callbacks.recorders import Recorder, step_profiler
from shardmake.train.callbacks.save_scheduler import SaveScheduler, StopOnRequest
from shardmake.train.checkpoint_saver import Saver
from shardmake.train.script_callbacks import ScriptHeartbeat, ScriptStop, TrainerCheck, script_callbacks
from tests.unit.run.test_attempt_history import make_record


class Clock:
    """A clock of seconds, and of the events in a GPU's stream."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def event(self, **_: bool) -> Any:
        """Return an event, whose time can be read once it is synchronized."""
        made: Any = SimpleNamespace(is_done=False)
        made.record = lambda: setattr(made, "time", self.now)
        made.synchronize = lambda: setattr(made, "is_done", True)
        made.elapsed_time = lambda end: 1000 * (end.time - made.time) if end.is_done else None
        return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(heartbeat_module.time, name, clock)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    return clock


class Engine(nn.Module):
    """Waits for 100 s around its linear layer, in the hooks of an engine, whose pass takes 2 s."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layer.register_forward_pre_hook(lambda *_: setattr(clock, "now", clock.now + 100))
        self.layer.register_forward_hook(lambda *_: setattr(clock, "now", clock.now + 100))
        compute, self.clock = self.layer.forward, clock
        self.layer.forward = lambda values: (setattr(clock, "now", clock.now + 2), compute(values))[1]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.clock.now += 5
        return self.layer(values)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_the_layers_of_a_training_model_count(clock: Clock, device: str) -> None:
    model, timer = Engine(clock), ComputeTimer()
    for _ in range(2):
        timer.attach(model, torch.device(device))
    for step in range(WINDOWS * WINDOW_STEPS + 2 * WINDOW_STEPS):
        assert len(timer.windows) == min(WINDOWS, max(0, step - 1) // WINDOW_STEPS)
        for training in (True, False, True):
            model.train(training)(torch.ones(2))
        timer.end_step()
    assert [*timer.windows] == pytest.approx([4.0] * WINDOWS)


def test_the_layers_are_spread_over_a_large_model(clock: Clock) -> None:
    model, timer = nn.Sequential(*[nn.Linear(1, 1) for _ in range(100)]), ComputeTimer()
    timer.attach(model, torch.device("cpu"))
    assert [number for number, layer in enumerate(model) if layer._forward_hooks] == [*range(0, 100, 4)]


ARGUMENTS: Any = None


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that the test sets."""
    wall = SimpleNamespace(now=1000.0)
    for name in ("time", "monotonic"):
        monkeypatch.setattr(heartbeat_module.time, name, lambda: wall.now)
    return wall


def last(heartbeat: HeartbeatCallback) -> Heartbeat:
    beat = Heartbeat.read_if_exists(heartbeat_file(heartbeat.folder.heartbeats, heartbeat.rank))
    assert beat
    return beat


def test_first_step_counts_as_median_until_there_are_others(tmp_path: Path, wall: Any) -> None:
    heartbeat, state, control = HeartbeatCallback(AttemptDir(tmp_path), 0), TrainerState(), TrainerControl()
    heartbeat.on_train_begin(ARGUMENTS, state, control)
    assert (last(heartbeat).phase, last(heartbeat).median_step_seconds) == ("first step", 0)
    for seconds, expected in ((700, 700), (400, 400), (500, 450)):
        wall.now += seconds
        heartbeat.on_step_end(ARGUMENTS, state, control)
        assert (last(heartbeat).phase, last(heartbeat).median_step_seconds) == ("train", expected)


def test_full_disk_does_not_end_training(
    tmp_path: Path, wall: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heartbeat, metrics = HeartbeatCallback(AttemptDir(tmp_path), 0), MetricsCallback(tmp_path / "metrics.jsonl", 64, 1)
    state, control = TrainerState(is_world_process_zero=True), TrainerControl()

    def step() -> None:
        wall.now += 5
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


@pytest.mark.parametrize(("losses", "norm", "message"), [
    ([1.0, 2.0], 3.0, None), ([1.0, 2.0], None, None), ([1.0, math.nan], 3.0, "Step 7: the loss of rank 3 is nan"),
    ([math.inf, 1.0], 3.0, "Step 7: the loss of rank 3 is inf"),
    ([1.0, 2.0], math.inf, "Step 7: the gradient norm is inf, although the losses of all ranks are finite"),
])  # fmt: skip
def test_error_names_step_and_cause(losses: list[float], norm: float | None, message: str | None) -> None:
    check = NonFiniteCheck(rank=3)
    for loss in losses:
        check.add_loss(torch.tensor(loss))
    check.set_norm(norm)
    with pytest.raises(NonFiniteError, match=message) if message else nullcontext() as error:
        check.on_step_end(SimpleNamespace(fp16=False), TrainerState(global_step=7), TrainerControl())
    assert error is None or error.value.step == 7


def test_overflow_under_loss_scaling_is_no_error_and_a_step_is_rewound_once() -> None:
    check = NonFiniteCheck(rank=0)
    check.set_norm(math.inf)
    check.on_step_end(SimpleNamespace(fp16=True), TrainerState(global_step=1), TrainerControl())
    assert may_rewind([make_record(failed_step=7)])
    assert may_rewind([make_record(failed_step=7), make_record(failed_step=9)])
    assert not may_rewind([make_record(failed_step=7), make_record(), make_record(failed_step=7)])
    assert not may_rewind([make_record()])


def run_steps(recorder: Recorder, first: int, last: int, *, stop: bool = False) -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    for step in range(first - 1, last):
        state: Any = SimpleNamespace(global_step=step)
        recorder.on_step_begin(None, state, None)
        (weight @ weight).sum().backward()
        state.global_step += 1
        control = SimpleNamespace(should_training_stop=stop and step == last - 1)
        recorder.on_step_end(None, state, control)


@pytest.mark.parametrize(("first", "last", "stop", "name"), [
    (1, 9, False, "trace-steps-5-6.json.gz"), (6, 9, False, "trace-steps-6-6.json.gz"),
    (1, 5, True, "trace-steps-5-5.json.gz"), (7, 9, False, None),
])  # fmt: skip
def test_the_steps_are_in_a_whole_trace(tmp_path: Path, first: int, last: int, stop: bool, name: str | None) -> None:
    """A training may be resumed or stopped between the two."""
    run_steps(step_profiler(tmp_path, Profile(first_step=5, steps=2)), first, last, stop=stop)
    assert [path.name for path in tmp_path.iterdir()] == ([name] if name else [])
    if name:
        events = json.loads(gzip.decompress((tmp_path / name).read_bytes()))["traceEvents"]
        assert sum(event.get("name") == "aten::mm" for event in events) >= 3, "forward and both gradients"


@pytest.mark.parametrize(("step", "requested", "evaluates", "saves"), [
    (1, False, False, False), (2, False, True, True), (3, False, True, False), (1, True, False, True),
    (2, True, False, True), (3, True, False, True), (10, False, True, True), (10, True, True, True),
])  # fmt: skip
def test_requested_stop_saves_only(tmp_path: Path, step: int, requested: bool, evaluates: bool, saves: bool) -> None:
    """The run saves every 2 steps. It evaluates every 3 steps and, because the best is kept, at each save."""
    arguments = TrainingArguments(use_cpu=True, save_steps=2, eval_strategy="steps", eval_steps=3)
    state = TrainerState(global_step=step, max_steps=10, is_world_process_zero=True)
    state.compute_steps(arguments, state.max_steps)
    stop_file = tmp_path / "STOP"
    if requested:
        stop_file.touch()
    scheduler = SaveScheduler(Saver(tmp_path, lambda step: {}, Retention(best=True)), None)
    handler = CallbackHandler([DefaultFlowCallback(), StopOnRequest([stop_file]), scheduler], None, None, None, None)
    control = handler.on_step_end(arguments, state, TrainerControl())
    assert (control.should_evaluate, control.should_save) == (evaluates, saves)
    assert control.should_training_stop == (requested or step == 10)


@pytest.mark.parametrize("first", [True, False])
def test_only_the_first_rank_looks_for_stop_files(first: bool) -> None:
    """The other ranks get its answer by a broadcast; here there is no process group, so they continue."""
    file, control = Mock(), TrainerControl()
    stop = StopOnRequest([file])
    stop.on_step_end(TrainingArguments(use_cpu=True), TrainerState(is_world_process_zero=first), control)
    assert file.exists.call_count == first
    assert control.should_training_stop == stop.requested == first


@pytest.fixture
def arguments() -> TrainingArguments:
    return TrainingArguments(use_cpu=True, max_steps=10)


def make_callbacks(folder: Path, text: str, *args: str) -> list[TrainerCallback]:
    script = folder / "train.py"
    script.write_text(text)
    program = ScriptProgram(path=str(script), args=list(args), sha256="")
    attempt = SimpleNamespace(rundir=RunDir(folder), number=3)
    settings = SimpleNamespace(program=program)
    context: Any = SimpleNamespace(attempt=attempt, folder=AttemptDir(folder), settings=settings, rank=0)
    nothing: Any = None
    return script_callbacks(context, nothing, nothing)


def test_a_script_that_names_a_file_handles_it_itself(tmp_path: Path) -> None:
    plain = make_callbacks(tmp_path, "trainer.train()")
    assert [type(callback) for callback in plain] == [TrainerCheck, ScriptHeartbeat, MetricsCallback, ScriptStop]
    own = make_callbacks(tmp_path, "open(os.environ['SHARDMAKE_METRICS'])", "--stop", "$SHARDMAKE_STOP_FILES")
    assert [type(callback) for callback in own] == [TrainerCheck, ScriptHeartbeat]


def test_own_rates_are_recorded(tmp_path: Path, arguments: TrainingArguments, caplog: pytest.LogCaptureFixture) -> None:
    guard, learned = SimpleNamespace(choice=SimpleNamespace(data_parallel=1)), []
    guard.set_trainer = lambda *values: learned.append(values[2:])
    context: Any = SimpleNamespace(settings=SimpleNamespace(arguments={"learning_rate": 1e-3, "max_steps": 10}), rank=0)
    trainer: Any = SimpleNamespace(_train_batch_size=8)
    check = TrainerCheck(cast("Any", guard), trainer, context)
    check.on_train_begin(arguments, TrainerState(max_steps=4), TrainerControl())
    assert learned == [(5e-5, 4)]
    assert [record.getMessage() for record in caplog.records] == [
        "The script trains with learning_rate 5e-05, the run has 0.001. Pass $SHARDMAKE_LEARNING_RATE in script_args, "
        "or remove the run's key."
    ]


def test_metrics_of_a_script_have_no_tokens(tmp_path: Path, arguments: TrainingArguments) -> None:
    callback = make_callbacks(tmp_path, "")[2]
    state = TrainerState(global_step=4, is_world_process_zero=True)
    (tmp_path / "train").mkdir()
    callback.on_log(arguments, state, TrainerControl(), logs={"loss": 2.5, "learning_rate": 1e-3})
    text = RunDir(tmp_path).metrics.read_text()
    assert '"loss": 2.5' in text and '"attempt": 3' in text and "tokens" not in text


def test_heartbeats_have_phases_only_while_trainer_trains(tmp_path: Path, arguments: TrainingArguments) -> None:
    heartbeat, state, control = ScriptHeartbeat(AttemptDir(tmp_path), 1), TrainerState(), TrainerControl()
    phases = {"prediction_step": USER_SCRIPT_PHASE, "train_begin": "first step", "step_end": "train"}
    for event, phase in (phases | {"train_end": USER_SCRIPT_PHASE, "evaluate": USER_SCRIPT_PHASE}).items():
        getattr(heartbeat, f"on_{event}")(arguments, state, control)
        beat = Heartbeat.read_if_exists(heartbeat_file(AttemptDir(tmp_path).heartbeats, 1))
        assert beat and beat.phase == phase


@pytest.mark.parametrize(("requested", "step", "recorded"), [(True, 5, True), (True, 10, False), (False, 5, False)])
def test_a_stop_is_recorded_before_the_end(
    tmp_path: Path, arguments: TrainingArguments, requested: bool, step: int, recorded: bool
) -> None:
    folder, stop_file = AttemptDir(tmp_path), tmp_path / "STOP"
    if requested:
        stop_file.touch()
    callback = ScriptStop([stop_file], folder)
    state, control = TrainerState(global_step=step, max_steps=10, is_world_process_zero=True), TrainerControl()
    callback.on_step_end(arguments, state, control)
    assert (control.should_save, control.should_training_stop) == (requested, requested)
    callback.on_train_end(arguments, state, control)
    stopped = RequestedStop.read_if_exists(folder.stopped)
    assert (stopped is not None) == recorded
    assert stopped is None or stopped.step == step
