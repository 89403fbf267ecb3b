"""A Trainer that saves through Shardmake's checkpoint store."""

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from shardmake.train import deepspeed_states
from shardmake.train.adam_states import fit_optimizer
from shardmake.train.callbacks.non_finite import NonFiniteCheck
from shardmake.train.checkpoint_files import (
    load_weights,
    restore_loss_window,
    save_loss_window,
    save_weights,
    unwrap,
)
from shardmake.train.checkpoint_saver import Saver
from shardmake.train.fsdp_precision import whole_tokens
from shardmake.train.library_patches import kept_matmul_precision
from shardmake.train.load_model import model_configs


class ShardedTrainer(Trainer):
    """A Trainer that saves through ``saver`` and whose sharded checkpoints contain the weights once.

    Transformers saves the weights a second time, gathered on rank 0 (ZeRO-1, ZeRO-2) or as a second sharded checkpoint
    (ZeRO-3). This class writes only the other files of a model folder beside the shards. ``non_finite`` gets every
    loss and gradient norm. Set both attributes before training starts. A trainer of
    another library gets the same as ``class Theirs(ShardedTrainer, LibrarysTrainer)``.
    """

    model: Any
    non_finite: NonFiniteCheck
    saver: Saver

    def __init__(self, **kwargs: Any) -> None:
        self.after_check: list[TrainerCallback] = []
        """Callbacks that are called after the check of the engine."""
        super().__init__(**kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator without its choice of TF32, which is the run's (``tf32``)."""
        with kept_matmul_precision():
            super().create_accelerator_and_postprocess()

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of one micro batch, and pass the loss to ``non_finite``."""
        loss = super().training_step(*args, **kwargs)
        self.non_finite.add_loss(loss)
        return loss

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        return whole_tokens(super()._get_num_items_in_batch(*args, **kwargs))

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        self.non_finite.set_norm(norm)
        return norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write config and tokenizer, and the weights if the engine does not shard."""
        folder = output_dir or self.args.output_dir
        assert folder is not None
        if self.args.should_save:
            model = unwrap(self.accelerator, self.model)
            if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
                save_weights(model, Path(folder))
            for part in model_configs(model):
                part.save_pretrained(folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)

    def _get_output_dir(self, trial: Any) -> str:
        """Return the folder to which checkpoints are written before their commit."""
        return str(self.saver.write_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step, required = self.state.global_step, self.control.should_training_stop
        lines = [line for line in self.state.log_history if line.get("step") == step]
        losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
        with self.saver.saving(step, required=required, eval_loss=losses[-1] if losses else None) as folder:
            if folder is not None:
                super()._save_checkpoint(model, trial)
                deepspeed_states.note_sub_groups(self.model_wrapped, folder)
                save_loss_window(self.accelerator, folder, self._globalstep_last_logged, self._tr_loss)

    def restore_loss_window(self, checkpoint: Path) -> None:
        """Restore the losses that were not logged at ``checkpoint``; Trainer itself starts the mean anew."""
        step = self.state.global_step
        self._globalstep_last_logged = restore_loss_window(self.accelerator, checkpoint, step, self._tr_loss)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_weights(unwrap(self.accelerator, self.model), Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint and self.is_deepspeed_enabled:
            deepspeed_states.restore(self.model_wrapped, Path(checkpoint))
        elif checkpoint:
            fit_optimizer(self.optimizer.optimizer)
