"""Train one rank with transformers' Trainer: load, check the engine, train, and write the receipt on rank 0."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer, TrainerCallback

from shardmake.data.dataset import Collator, check_isolation, collator, load
from shardmake.data.sequence_parts import PartCollator
from shardmake.train import deepspeed_states
from shardmake.train.callbacks.heartbeat import HeartbeatCallback
from shardmake.train.callbacks.non_finite import NonFiniteCheck
from shardmake.train.callbacks.save_scheduler import StopOnRequest
from shardmake.train.checkpoint_files import load_weights, save_weights
from shardmake.train.checkpoint_saver import Saver
from shardmake.train.fsdp_precision import whole_tokens
from shardmake.train.learning_check import BuiltTraining
from shardmake.train.load_model import load_model, load_tokenizer, model_configs
from shardmake.train.process_group import extend_timeouts, leave_together
from shardmake.train.rank_context import RankContext
from shardmake.train.sequence_parallel import share_sequences
from shardmake.train.training_setup import (
    WholeBatches,
    check_ready,
    make_callbacks,
    planned_optimizer,
    record_completion,
    start_rank,
    training_arguments,
)


class ShardedTrainer(Trainer):
    """A Trainer that saves through ``saver`` and whose sharded checkpoints contain the weights once.

    Transformers saves the weights a second time, gathered on rank 0 (ZeRO-1, ZeRO-2) or as a second sharded checkpoint
    (ZeRO-3). This class writes only the other files of a model folder beside the shards. ``non_finite`` gets every
    loss and gradient norm. Set both attributes before training starts.
    """

    non_finite: NonFiniteCheck
    saver: Saver

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
            model = self.accelerator.unwrap_model(self.model)
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

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_weights(self.accelerator.unwrap_model(self.model), Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint and self.is_deepspeed_enabled:
            deepspeed_states.restore(self.model_wrapped, Path(checkpoint))


def train(attempt_folder: Path) -> None:
    """Run this rank of the attempt in ``attempt_folder`` to its end."""
    context, heartbeat = start_rank(attempt_folder)
    trainer, stop = _make_trainer(context, heartbeat)
    trainer.add_callback(EngineCheck(context, trainer))
    trainer.train(resume_from_checkpoint=context.attempt.resume_from)
    if context.rank == 0:
        record_completion(context, trainer.state, stopped=stop.requested)
    leave_together()


def _make_trainer(context: RankContext, heartbeat: HeartbeatCallback) -> tuple[ShardedTrainer, StopOnRequest]:
    rundir, plan = context.attempt.rundir, context.plan
    # The arguments come before the model: transformers reads them to load the model sharded.
    arguments = training_arguments(context)
    model = load_model(context.settings)
    callbacks = make_callbacks(context, heartbeat)
    trainer = ShardedTrainer(
        model=model,
        args=arguments,
        train_dataset=WholeBatches(load(rundir.data, "train"), plan.choice.global_batch_size),
        eval_dataset=load(rundir.data, "eval"),
        data_collator=_collator(context),
        processing_class=load_tokenizer(context.settings),
        optimizer_cls_and_kwargs=planned_optimizer(context.settings),
        callbacks=callbacks.callbacks,
    )
    trainer.non_finite, trainer.saver = callbacks.non_finite, callbacks.saver
    _share_data(trainer, plan.choice.group_size)
    return trainer, callbacks.stop


def _collator(context: RankContext) -> Collator | PartCollator:
    plan = context.plan
    whole, ranks = collator(context.attempt.rundir.data, plan.workload.attention), plan.choice.sequence_parallel
    return PartCollator(whole, context.rank % ranks, ranks) if ranks > 1 else whole


def _share_data(trainer: ShardedTrainer, group_size: int) -> None:
    """Give the ranks of a tensor-parallel or sequence-parallel group the same rows.

    Accelerate's data loaders read this mesh, but Accelerate creates it only after them. Without it, each rank of a
    group would silently get different data. They know a group by the name "tp" whatever it shares.
    """
    if group_size > 1:
        shape = (trainer.args.world_size // group_size, group_size)
        mesh = init_device_mesh(trainer.args.device.type, shape, mesh_dim_names=("dp", "tp"))
        trainer.accelerator.state.ds_device_mesh = mesh


class EngineCheck(TrainerCallback):
    """Compare the engine with the plan before the first step."""

    def __init__(self, context: RankContext, trainer: ShardedTrainer) -> None:
        self.context, self.trainer = context, trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise on every rank if the engine differs from the plan."""
        extend_timeouts(args.ddp_timeout_delta)
        accelerator, collate = self.trainer.accelerator, self.trainer.data_collator
        built = BuiltTraining(
            model=self.trainer.model_wrapped,
            optimizer=kwargs["optimizer"],
            scheduler=kwargs["lr_scheduler"],
            batches=kwargs["train_dataloader"],
            arguments=args,
            precision=accelerator.mixed_precision,
            autocasts=accelerator.native_amp,
            steps=state.max_steps,
        )
        check_ready(self.context, built)
        if isinstance(collate, PartCollator):
            group = accelerator.state.ds_device_mesh["tp"].get_group()
            share_sequences(built.model, collate, group, self.context.plan.choice.micro_batch_size)
        else:
            dtype = getattr(torch, self.context.settings.expected.dtype)
            check_isolation(built.model, collate, args.device, dtype)
