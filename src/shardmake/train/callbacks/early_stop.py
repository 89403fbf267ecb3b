"""End a training whose evaluation loss no longer falls."""

import logging
import math
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from shardmake.run.training_settings import TrainingSettings

logger = logging.getLogger(__name__)


def early_stop(settings: TrainingSettings) -> list[TrainerCallback]:
    """Return the callback if the run asks for it."""
    patience = settings.checkpoints.early_stopping
    return [EarlyStop(patience)] if patience else []


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
