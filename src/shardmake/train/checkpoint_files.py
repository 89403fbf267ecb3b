"""The weights of a model that no engine shards, and the losses that were not logged, in Trainer's checkpoints."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from shardmake.run.metrics import LOSS_WINDOW, LossWindow, read_loss_window


def unwrap(accelerator: Accelerator, model: Any) -> Any:
    """Return ``model`` without the wrappers of engines and of `torch.compile`, which would add a level to names.

    Accelerate would keep the compiler's wrapper, and put it around the model without its engine.
    """
    return accelerator.unwrap_model(model, keep_torch_compile=False)


def save_loss_window(accelerator: Accelerator, folder: Path, logged_step: int, loss_sum: torch.Tensor) -> None:
    """Write each rank's ``loss_sum``, a scalar, of the steps since ``logged_step``; every rank must take part."""
    sums = accelerator.gather(loss_sum.detach().reshape(1)).tolist()
    if accelerator.is_main_process:
        LossWindow(logged_step=logged_step, sums=sums).write(folder / LOSS_WINDOW)


def restore_loss_window(accelerator: Accelerator, folder: Path, step: int, loss_sum: torch.Tensor) -> int:
    """Set ``loss_sum`` to this rank's losses that were not logged at ``step``, and return the last logged step."""
    window = read_loss_window(folder)
    if window is None:
        return step
    loss_sum.fill_(window.own_sum(accelerator.process_index, accelerator.num_processes))
    return window.logged_step


def save_weights(model: Any, folder: Path) -> None:
    """Write the weights of an unsharded model, or its adapter, under the names that they have in the model.

    ``save_pretrained`` would write those of the base model's files, such as one weight for each expert of a mixture;
    ``load_state_dict`` does not convert them back. The merge writes the names of the base.
    """
    model.save_pretrained(folder, **({} if hasattr(model, "peft_config") else {"save_original_format": False}))


def load_weights(model: Any, folder: Path) -> None:
    """Load what `save_weights` wrote; `CheckpointError` for missing or unexpected names (`refuse_partial_states`)."""
    if hasattr(model, "peft_config"):
        model.load_adapter(folder, "default", is_trainable=True)
        return
    weights = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    model.load_state_dict(weights, strict=False)
