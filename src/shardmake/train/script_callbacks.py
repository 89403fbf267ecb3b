"""Callbacks that every Trainer of a user's script gets: checks, heartbeat, metrics and stop."""

import logging
import time
from pathlib import Path
from typing import Any, Final

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from shardmake.config.script_file import script_file
from shardmake.core.private_names import private
from shardmake.run.attempt import USER_SCRIPT_PHASE, AttemptDir, RequestedStop
from shardmake.run.training_settings import ScriptProgram
from shardmake.train.callbacks.heartbeat import HeartbeatCallback
from shardmake.train.callbacks.metrics import MetricsCallback
from shardmake.train.callbacks.save_scheduler import StopOnRequest
from shardmake.train.rank_context import RankContext
from shardmake.train.script_guard import Batch, ScriptGuard

logger = logging.getLogger(__name__)
_COMPARED: Final = {"learning_rate": "LEARNING_RATE", "max_steps": "MAX_STEPS", "num_train_epochs": "EPOCHS"}
"""Arguments of Trainer that a run may have, with the variable that passes each."""


def script_callbacks(context: RankContext, guard: ScriptGuard, trainer: Trainer) -> list[TrainerCallback]:
    """Return the callbacks for ``trainer``.

    A script that names ``SHARDMAKE_METRICS`` or ``SHARDMAKE_STOP_FILES`` handles them itself.
    """
    rundir, folder = context.attempt.rundir, context.folder
    program = context.settings.program
    assert isinstance(program, ScriptProgram)
    names = "\n".join([script_file(program.path).read_text(errors="replace"), *program.args])
    callbacks: list[TrainerCallback] = [TrainerCheck(guard, trainer, context), ScriptHeartbeat(folder, context.rank)]
    if "SHARDMAKE_METRICS" not in names:
        callbacks.append(MetricsCallback(rundir.metrics, None, context.attempt.number))
    if "SHARDMAKE_STOP_FILES" not in names:
        callbacks.append(ScriptStop([rundir.stop_file, folder.stop_file], folder))
    return callbacks


class TrainerCheck(TrainerCallback):
    """Check ranks and batch of a Trainer before its first step, and report a learning rate or length of its own."""

    def __init__(self, guard: ScriptGuard, trainer: Trainer, context: RankContext) -> None:
        self.guard, self.trainer, self.context = guard, trainer, context

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise `EngineMismatchError` if ranks or batch are not the planned ones."""
        sizes = (private(self.trainer).train_batch_size, args.gradient_accumulation_steps)
        batch = Batch.of(*sizes, self.guard.choice.data_parallel)
        self.guard.set_trainer(args.world_size, batch, args.learning_rate, state.max_steps)
        planned = self.context.settings.arguments
        for name, variable in _COMPARED.items():
            if name in planned and getattr(args, name) != planned[name] and self.context.rank == 0:
                logger.warning(
                    "The script trains with %s %s, the run has %s. Pass $SHARDMAKE_%s in script_args, or remove the "
                    "run's key.",
                    *(name, getattr(args, name), planned[name], variable),
                )


class ScriptHeartbeat(HeartbeatCallback):
    """Write heartbeats that detect a hang while Trainer trains, and none that do before and after."""

    def __init__(self, folder: AttemptDir, rank: int) -> None:
        super().__init__(folder, rank)
        self.training = False

    def beat(self, phase: str, step: int) -> None:
        """Write a heartbeat; outside of training the phase is that of a script."""
        super().beat(phase if self.training else USER_SCRIPT_PHASE, step)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start to report phases."""
        self.training = True
        super().on_train_begin(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop to report phases; the script may take any time for what follows."""
        self.training = False
        super().on_train_end(args, state, control, **kwargs)


class ScriptStop(StopOnRequest):
    """Save and stop on request, and record that the script stopped for that reason."""

    def __init__(self, files: list[Path], folder: AttemptDir) -> None:
        super().__init__(files)
        self.folder = folder

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the stop record on rank 0."""
        if self.requested and state.global_step < state.max_steps and state.is_world_process_zero:
            RequestedStop(step=state.global_step, time=time.time()).write(self.folder.stopped)
