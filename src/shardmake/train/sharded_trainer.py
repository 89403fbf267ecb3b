"""A Trainer that saves through Shardmake's checkpoint store, and what it trains with."""

import importlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback

from shardmake.core.private_names import private
from shardmake.memory.model import find_rates
from shardmake.memory.parameter_inventory import parameters, plain_name
from shardmake.run.length import steps_per_epoch
from shardmake.run.metrics import LOSS_WINDOW, LossWindow
from shardmake.run.training_settings import TrainingSettings
from shardmake.train import optimizer_states
from shardmake.train.callbacks.non_finite import NonFiniteCheck
from shardmake.train.checkpoint_saver import Saver
from shardmake.train.fsdp_precision import whole_tokens
from shardmake.train.library_patches import kept_matmul_precision
from shardmake.train.load_model import model_configs
from shardmake.train.muon import MuonWithAdamW


class ShardedTrainer(Trainer):
    """A Trainer that saves through ``saver`` and whose sharded checkpoints contain the weights once.

    Transformers saves the weights a second time, gathered on rank 0 (ZeRO-1, ZeRO-2) or as a second sharded checkpoint
    (ZeRO-3). This class writes only the other files of a model folder beside the shards. ``non_finite`` gets every
    loss and gradient norm. A trainer of another library gets the same as ``class Theirs(ShardedTrainer, Its)``.
    """

    model: Any
    non_finite: NonFiniteCheck
    saver: Saver
    learning_rates: Mapping[str, float] = MappingProxyType({})
    """Rates of some weights, by pattern."""

    def __init__(self, **kwargs: Any) -> None:
        self.after_check: list[TrainerCallback] = []
        """Callbacks that are called after the check of the engine."""
        super().__init__(**kwargs)
        self.add_callback(_NextEpoch(self))

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator without its choice of TF32, which is the run's (``tf32``)."""
        with kept_matmul_precision():
            super().create_accelerator_and_postprocess()

    def create_optimizer(self, *arguments: Any, **options: Any) -> torch.optim.Optimizer:
        """Create the optimizer, with groups for Muon and for ``learning_rates``, before an engine wraps the model."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*arguments, **options)
        if is_new and isinstance(optimizer, MuonWithAdamW):
            matrices = {plain_name(one.name) for one in parameters(self.model) if one.is_hidden_matrix}
            split_groups(optimizer, self.model, [(matrices, {"orthogonal": True})])
            assert any(group["orthogonal"] for group in optimizer.param_groups), "Muon has no matrix"
        if is_new and self.learning_rates:
            patterns = find_rates(trained_names(self.model).values(), self.learning_rates)
            parts = {p: {name for name, one in patterns.items() if one == p} for p in self.learning_rates}
            split_groups(optimizer, self.model, [(parts[p], {"lr": rate}) for p, rate in self.learning_rates.items()])
        return optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of one micro batch, and pass the loss to ``non_finite``."""
        loss = super().training_step(*args, **kwargs)
        self.non_finite.add_loss(loss)
        return loss

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        return whole_tokens(private(super()).get_num_items_in_batch(*args, **kwargs))

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = private(super()).get_grad_norm(*args, **kwargs)
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
        return str(self.saver.write_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step, required = self.state.global_step, self.control.should_training_stop
        lines = [line for line in self.state.log_history if line.get("step") == step]
        losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
        with self.saver.saving(step, required=required, eval_loss=losses[-1] if losses else None) as folder:
            if folder is not None:
                private(super()).save_checkpoint(model, trial)
                optimizer_states.note_sub_groups(self.model_wrapped, folder)
                self._save_loss_window(folder)

    def _save_loss_window(self, folder: Path) -> None:
        """Write each rank's sum of the losses that were not logged; every rank must take part."""
        sums = self.accelerator.gather(private(self).tr_loss.detach().reshape(1)).tolist()
        if self.accelerator.is_main_process:
            LossWindow(logged_step=private(self).globalstep_last_logged, sums=sums).write(folder / LOSS_WINDOW)

    def restore_loss_window(self, checkpoint: Path) -> None:
        """Restore the losses that were not logged at ``checkpoint``; Trainer itself starts the mean anew."""
        private(self).globalstep_last_logged = self.state.global_step
        if window := LossWindow.read_if_exists(checkpoint / LOSS_WINDOW):
            private(self).globalstep_last_logged = window.logged_step
            own = window.own_sum(self.accelerator.process_index, self.accelerator.num_processes)
            private(self).tr_loss.fill_(own)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            private(super()).load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_weights(unwrap(self.accelerator, self.model), Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        private(super()).load_optimizer_and_scheduler(checkpoint)
        if checkpoint and self.is_deepspeed_enabled:
            optimizer_states.restore(self.model_wrapped, Path(checkpoint))
            if self.learning_rates:  # ZeRO-3 reads one rate at most from a universal checkpoint
                for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                    group["lr"] = rate
        elif checkpoint:
            optimizer_states.fit_optimizer(self.optimizer.optimizer)


def trained_names(model: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """Return the name of each trained parameter."""
    return {parameter: plain_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}


def split_groups(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, parts: Iterable[tuple[Collection[str], dict[str, Any]]]
) -> None:
    """Give the parameters of each part, by their names, groups with other settings, after the others.

    No group is empty, as under DeepSpeed, which drops those: checkpoints have the same groups under every strategy.
    """
    names = trained_names(model)
    for part, settings in parts:
        for group in [*optimizer.param_groups]:
            found = [one for one in group["params"] if names[one] in part]
            group["params"] = [one for one in group["params"] if names[one] not in part]
            if found:
                optimizer.add_param_group({**group, "params": found, **settings})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def unwrap(accelerator: Accelerator, model: Any) -> Any:
    """Return ``model`` without the wrappers of engines and of `torch.compile`, which would add a level to names.

    Accelerate would keep the compiler's wrapper, and put it around the model without its engine.
    """
    return accelerator.unwrap_model(model, keep_torch_compile=False)


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


def planned_optimizer(settings: TrainingSettings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Return the planned optimizer's class and arguments; None if the training arguments name the optimizer."""
    optimizer = settings.optimizer
    if optimizer is None:
        return None
    module, _, name = optimizer.class_name.rpartition(".")
    return getattr(importlib.import_module(module), name), optimizer.arguments


class WholeBatches(Dataset[Any]):
    """A data set of whole global batches: the samples that remain are left out, in each ``epoch`` others in turn.

    It keeps the samples of every optimizer step the same for any number of ranks. Trainer draws one order per epoch
    from the seed and distributes micro batches to the ranks in turn. So step k of an epoch takes samples k G to
    (k + 1) G of that order, however a global batch of G is split. Only the end of an epoch would depend on the split:
    Trainer fills the last samples up to full micro batches on all ranks, not to a global batch.

    Fewer samples than a batch are repeated until they fill it.
    """

    def __init__(self, data: Any, global_batch_size: int) -> None:
        self.data, self.epoch = data, 0
        self.steps = steps_per_epoch(len(data), global_batch_size)
        self.length = self.steps * global_batch_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index`` of the epoch, in the order of the data."""
        count, rest = len(self.data), len(self.data) - self.length
        if rest < 0:
            return self.data[(index + self.epoch * self.length) % count]
        gap = (self.length + self.epoch * rest) % count  # start of those left out; they continue at 0 after the last
        index += max(0, gap + rest - count)
        return self.data[index if index < gap else index + rest]


class _NextEpoch(TrainerCallback):
    """Set the epoch of the data of ``trainer`` before its loader starts, also after a resume."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the number of the epoch that begins with the next step."""
        data = self.trainer.train_dataset
        if isinstance(data, WholeBatches):
            data.epoch = state.global_step // data.steps
