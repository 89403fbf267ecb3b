"""Save and stop when a stop file appears."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState


class StopOnRequest(TrainerCallback):
    """Check for stop files on rank 0 at the end of each step; all ranks follow its result."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.requested = False

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Request a save and the end of training if a stop file exists."""
        flag = torch.tensor([int(any(file.exists() for file in self.files))], device=args.device)
        if dist.is_initialized():
            dist.broadcast(flag, src=0)
        if flag.item():
            self.requested = True
            control.should_save = True
            control.should_training_stop = True
