"""Stop before a loss or gradient norm that is not finite reaches a checkpoint, and report its origin."""

from math import isfinite
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from shardmake.train.collectives import gather


class NonFiniteError(FloatingPointError):
    """A loss or a gradient norm is infinite or not a number after ``step``."""

    def __init__(self, step: int, cause: str) -> None:
        super().__init__(f"Step {step}: {cause}. No checkpoint contains this step.")
        self.step = step


class NonFiniteCheck(TrainerCallback):
    """Check each step before anything is saved. The trainer passes the losses and gradient norms.

    A gradient norm is the same on all ranks, so all ranks look for the rank with the bad loss together. A loss is
    each rank's own. In fp16 the loss scaler skips steps whose gradients overflow, so only the loss is checked.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.loss: torch.Tensor | float = 0.0
        self.norm: torch.Tensor | float = 0.0

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of one pass. A sum stays non-finite, and summing does not wait for the GPU."""
        self.loss = self.loss + loss.detach()

    def set_norm(self, norm: torch.Tensor | float | None) -> None:
        """Keep the step's gradient norm."""
        self.norm = 0.0 if norm is None else norm

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise `NonFiniteError` if this step's loss or gradient norm is not finite."""
        loss, norm = float(self.loss), 0.0 if args.fp16 else float(self.norm)
        self.loss = self.norm = 0.0
        if not isfinite(norm):
            raise NonFiniteError(state.global_step, _find_culprits(norm, loss))
        if not isfinite(loss):
            raise NonFiniteError(state.global_step, f"the loss of rank {self.rank} is {loss}")


def _find_culprits(norm: float, loss: float) -> str:
    """Return which ranks' losses caused a bad gradient norm; all ranks take part."""
    bad = {rank: value for rank, value in enumerate(gather(loss)) if not isfinite(value)}
    culprits = ", ".join(f"the loss of rank {rank} is {value}" for rank, value in bad.items())
    return culprits or f"the gradient norm is {norm}, although the losses of all ranks are finite"
