"""Write and read the plain loop's checkpoints, with the same names and formats as Trainer's.

DeepSpeed and FSDP write their shards. The other files are the scheduler, the state (step, losses), each rank's random
states, and the files of a model folder other than the weights.
"""

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from safetensors.torch import load_file
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals
from transformers.training_args import ParallelMode

from shardmake.checkpoint.training_receipt import TRAINER_STATE
from shardmake.run.metrics import LOSS_WINDOW, LossWindow, read_loss_window
from shardmake.train import deepspeed_states
from shardmake.train.adam_states import fit_optimizer
from shardmake.train.load_model import model_configs

if TYPE_CHECKING:
    from shardmake.train.loop import Loop


def save(loop: "Loop", folder: Path) -> None:
    """Write the checkpoint of ``loop``; every rank must take part."""
    accelerator, model = loop.accelerator, unwrap(loop.accelerator, loop.model)
    folder.mkdir(parents=True, exist_ok=True)
    is_adapter = hasattr(model, "peft_config")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        loop.model.save_checkpoint(str(folder), exclude_frozen_parameters=is_adapter)
        deepspeed_states.note_sub_groups(loop.model, folder)
    elif accelerator.distributed_type == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        save_fsdp_model(plugin, accelerator, loop.model, str(folder), adapter_only=is_adapter)
        save_fsdp_optimizer(plugin, accelerator, loop.optimizer, loop.model, str(folder))
    elif accelerator.is_main_process:
        save_weights(model, folder)
        torch.save(loop.optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(_random_states(loop), folder / _random_file(loop))
    if accelerator.is_main_process:
        for part in (*model_configs(model), loop.tokenizer):
            part.save_pretrained(folder)
        torch.save(loop.scheduler.state_dict(), folder / "scheduler.pt")
        if accelerator.scaler is not None:
            torch.save(accelerator.scaler.state_dict(), folder / "scaler.pt")
        loop.state.save_to_json(str(folder / TRAINER_STATE))
    save_loss_window(accelerator, folder, loop.logged_step, loop.loss_sum)


def unwrap(accelerator: Accelerator, model: Any) -> Any:
    """Return ``model`` without the wrappers of engines and of `torch.compile`, which would add a level to names.

    Accelerate would keep the compiler's wrapper, and put it around the model without its engine.
    """
    return accelerator.unwrap_model(model, keep_torch_compile=False)


def load(loop: "Loop", folder: Path) -> None:
    """Restore ``loop`` from the checkpoint ``folder``, which the loop or Trainer has written."""
    accelerator = loop.accelerator
    model = unwrap(accelerator, loop.model)
    is_adapter = hasattr(model, "peft_config")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        loaded, _ = loop.model.load_checkpoint(str(folder), load_module_strict=not is_adapter)
        if loaded is None:  # DeepSpeed only warns, and would train the base model
            raise RuntimeError(f"Loading the checkpoint failed: DeepSpeed found no checkpoint in {folder}.")
        deepspeed_states.restore(loop.model, folder)
    elif accelerator.distributed_type == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        load_fsdp_model(plugin, accelerator, loop.model, str(folder), adapter_only=is_adapter)
        load_fsdp_optimizer(plugin, accelerator, loop.optimizer, loop.model, str(folder), adapter_only=is_adapter)
    else:
        load_weights(model, folder)
        loop.optimizer.load_state_dict(_read(folder / "optimizer.pt"))
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        fit_optimizer(loop.optimizer.optimizer)
    loop.scheduler.load_state_dict(_read(folder / "scheduler.pt"))
    if accelerator.scaler is not None and (folder / "scaler.pt").exists():
        accelerator.scaler.load_state_dict(_read(folder / "scaler.pt"))
    saved = TrainerState.load_from_json(str(folder / TRAINER_STATE))
    loop.state.global_step, loop.state.log_history = saved.global_step, saved.log_history
    loop.logged_step = restore_loss_window(accelerator, folder, saved.global_step, loop.loss_sum)
    if (folder / _random_file(loop)).exists():  # a checkpoint of fewer ranks has none for the added ranks
        _set_random_states(folder / _random_file(loop))


def _read(path: Path) -> Any:
    """Load a file to host memory; its tensors are of rank 0's GPU, and would all be loaded there on every rank."""
    return torch.load(path, map_location="cpu", weights_only=True)


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


def _random_file(loop: "Loop") -> str:
    ranks = loop.accelerator.num_processes
    return f"rng_state_{loop.accelerator.process_index}.pth" if ranks > 1 else "rng_state.pth"


def _random_states(loop: "Loop") -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    if not torch.cuda.is_available():
        return states
    distributed = loop.arguments.parallel_mode == ParallelMode.DISTRIBUTED  # as in Trainer
    return states | {"cuda": torch.cuda.get_rng_state_all() if distributed else torch.cuda.get_rng_state()}


def _set_random_states(path: Path) -> None:
    with safe_globals():
        states = _read(path)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        own = _state_of_gpu(states.get("cuda", []), torch.cuda.current_device())
        if own is not None:
            torch.cuda.set_rng_state(own)


def _state_of_gpu(states: torch.Tensor | list[torch.Tensor], gpu: int) -> torch.Tensor | None:
    """Return the state of ``gpu`` from those of a node's GPUs, or the only one; None if that node had fewer GPUs."""
    if isinstance(states, torch.Tensor):
        return states
    return states[gpu] if gpu < len(states) else None
