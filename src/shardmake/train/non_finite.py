"""Stop before a loss or gradient norm that is not finite gets into a checkpoint, and say where it came from."""

from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class NonFiniteError(FloatingPointError):
    """A loss or a gradient norm is infinite or not a number after ``step``."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"Step {step}: {what}. No checkpoint holds this step.")
        self.step = step


class NonFiniteCheck(TrainerCallback):
    """Checks each step, before anything is saved. The trainer hands it the losses and gradient norms.

    A gradient norm is the same on all ranks, so all of them look for the rank with the bad loss together; a loss
    alone is each rank's own. In fp16 the loss scaler skips steps whose gradients overflow; only the loss counts then.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.loss: torch.Tensor | float = 0.0
        self.norm: torch.Tensor | float = 0.0

    def see_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of one pass; a sum stays not finite, and nothing waits for the GPU here."""
        self.loss = self.loss + loss.detach()

    def see_norm(self, norm: torch.Tensor | float | None) -> None:
        """Keep the step's gradient norm."""
        self.norm = 0.0 if norm is None else norm

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise `NonFiniteError` for this step if need be."""
        loss, norm = float(self.loss), 0.0 if args.fp16 else float(self.norm)
        self.loss = self.norm = 0.0
        if not _is_finite(norm):
            raise NonFiniteError(state.global_step, _name_culprits(norm, loss))
        if not _is_finite(loss):
            raise NonFiniteError(state.global_step, f"the loss of rank {self.rank} is {loss}")


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")


def _name_culprits(norm: float, loss: float) -> str:
    """What all ranks say after a bad gradient norm: whose loss made it so."""
    losses = [loss]
    if dist.is_initialized():
        losses = [0.0] * dist.get_world_size()
        dist.all_gather_object(losses, loss)
    bad = {rank: value for rank, value in enumerate(losses) if not _is_finite(value)}
    named = ", ".join(f"the loss of rank {rank} is {value}" for rank, value in bad.items())
    return named or f"the gradient norm is {norm}, though the losses of all ranks are finite"
