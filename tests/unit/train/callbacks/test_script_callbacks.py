"""The callbacks that a user's Trainer gets."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shardmake.run.attempt import USER_SCRIPT_PHASE, AttemptDir, Heartbeat, RequestedStop, heartbeat_file
from shardmake.run.paths import RunDir
from shardmake.run.training_settings import ScriptProgram
from shardmake.train.callbacks.metrics import MetricsCallback
from shardmake.train.script_callbacks import ScriptHeartbeat, ScriptStop, TrainerCheck, script_callbacks


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
