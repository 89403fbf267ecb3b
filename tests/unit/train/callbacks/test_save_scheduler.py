"""Evaluations and saves at the end of a step."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from shardmake.run.training_settings import Retention
from shardmake.train.callbacks.save_scheduler import SaveScheduler, StopOnRequest
from shardmake.train.checkpoint_saver import Saver


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
