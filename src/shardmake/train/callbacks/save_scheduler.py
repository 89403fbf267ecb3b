"""Set how often checkpoints are saved and which saved steps are evaluated; stop early or on request."""

import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState

from shardmake.checkpoint.interval import interval_seconds
from shardmake.train.checkpoint_saver import Saver
from shardmake.train.collectives import run_on_first_rank

logger = logging.getLogger(__name__)


class SaveScheduler(TrainerCallback):
    """Set the number of steps between two saves; evaluate each saved step if the best checkpoint is kept.

    It must follow `StopOnRequest`: a requested stop saves at once, without an evaluation.

    Trainer saves at multiples of ``state.save_steps`` and restores that number from the checkpoint. This callback
    replaces it with the configured number. If ``mtbf_seconds`` is given, the interval is Young's, computed from the
    measured times of a save and of a step. The first save, after `FIRST_SAVE` steps, provides the measurement and
    shows early that saving works. The interval is never shorter than the upload of the newest checkpoint.
    """

    FIRST_SAVE = 10

    def __init__(self, saver: Saver, mtbf_seconds: float | None) -> None:
        self.saver = saver
        self.mtbf_seconds = mtbf_seconds
        self.measured_seconds = 0.0
        self.steps = 0
        self.step_start = 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Replace the interval of the attempt before."""
        state.compute_steps(args, state.max_steps)
        if self.mtbf_seconds:
            state.save_steps = self.FIRST_SAVE

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the measurement of a step."""
        self.step_start = time.monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure the step, except this process's first one, which may compile kernels; decide on an evaluation."""
        if self.steps:
            self.measured_seconds += time.monotonic() - self.step_start
        self.steps += 1
        if control.should_training_stop and state.global_step < state.max_steps:
            control.should_evaluate = False  # it would delay the save, and a time limit may not leave enough time
        elif control.should_save and self.saver.retention.best:
            control.should_evaluate = True

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Set the interval from the measured times; rank 0's clock decides for all ranks."""
        if not self.mtbf_seconds or self.saver.seconds is None or self.steps < 2:
            return
        seconds = interval_seconds(self.saver.seconds, self.mtbf_seconds, self.saver.upload_seconds)
        step_seconds = self.measured_seconds / (self.steps - 1)
        steps = run_on_first_rank(lambda: max(1, math.ceil(seconds / step_seconds)))
        if state.is_world_process_zero and state.save_steps != steps:
            reason = f"Young's formula for a failure every {self.mtbf_seconds / 3600:.0f} h"
            if seconds == self.saver.upload_seconds:
                reason = "the time of an upload"
            logger.info(
                "A save takes %.1f s. The next saves follow every %d steps (%.0f min), by %s.",
                *(self.saver.seconds, steps, seconds / 60, reason),
            )
        state.save_steps = steps


class StopOnRequest(TrainerCallback):
    """Check for stop files on rank 0 at the end of each step; all ranks follow its result."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.requested = False

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Request a save and the end of training if a stop file exists."""
        # Only rank 0 asks: two lookups per rank and step would load the shared file system.
        exists = state.is_world_process_zero and any(file.exists() for file in self.files)
        flag = torch.tensor([int(exists)], device=args.device)
        if dist.is_initialized():
            dist.broadcast(flag, src=0)
        if flag.item():
            self.requested = True
            control.should_save = True
            control.should_training_stop = True


class EarlyStop(TrainerCallback):
    """Make the current step the last one after ``patience`` evaluations without a lower loss.

    The losses are those of the Trainer's state, which a checkpoint restores, so that an interruption changes nothing.
    The step is saved with itself as the number of steps: the training counts as finished.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Compare this loss with those before."""
        found = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry]
        losses = [loss if math.isfinite(loss) else math.inf for loss in found]
        since_best = len(losses) - 1 - losses.index(min(losses)) if losses else 0
        if since_best < self.patience or state.global_step >= state.max_steps:
            return
        if state.is_world_process_zero:
            logger.info(
                "The evaluation loss was lowest %d evaluations ago (%.4g). The training of %d steps ends at step %d.",
                *(since_best, min(losses), state.max_steps, state.global_step),
            )
        state.max_steps = state.global_step
        control.should_save = control.should_training_stop = True
