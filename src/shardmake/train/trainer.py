"""Train one rank with transformers' Trainer: load, check the engine, train, and write the receipt on rank 0."""

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

from shardmake.config.objectives import OBJECTIVES
from shardmake.data.dataset import Collator, PartCollator, Sequences, check_isolation, collator
from shardmake.train.callbacks.heartbeat import HeartbeatCallback
from shardmake.train.callbacks.save_scheduler import StopOnRequest
from shardmake.train.learning_check import BuiltTraining
from shardmake.train.load_model import load_model, load_tokenizer
from shardmake.train.process_group import extend_timeouts, leave_together
from shardmake.train.rank_context import RankContext
from shardmake.train.row_groups import share_rows
from shardmake.train.sequence_parallel import share_sequences
from shardmake.train.sharded_trainer import ShardedTrainer
from shardmake.train.training_setup import (
    WholeBatches,
    check_ready,
    make_callbacks,
    planned_optimizer,
    record_completion,
    start_rank,
    training_arguments,
)


def train(attempt_folder: Path) -> None:
    """Run this rank of the attempt in ``attempt_folder`` to its end."""
    context, heartbeat = start_rank(attempt_folder)
    trainer, stop = _make_trainer(context, heartbeat)
    for callback in (EngineCheck(context, trainer), *trainer.after_check):
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=context.attempt.resume_from)
    if context.rank == 0:
        record_completion(context, trainer.state, stopped=stop.requested)
    leave_together()


def _make_trainer(context: RankContext, heartbeat: HeartbeatCallback) -> tuple[ShardedTrainer, StopOnRequest]:
    # The arguments come before the model: transformers reads them to load the model sharded.
    arguments = training_arguments(context)
    callbacks = make_callbacks(context, heartbeat)
    trainer: ShardedTrainer
    if OBJECTIVES[context.settings.objective].trl is None:
        trainer = make_sft_trainer(context, arguments, callbacks.callbacks)
    else:
        from shardmake.train.preferences import make_trl_trainer  # the import of TRL takes seconds

        trainer = make_trl_trainer(context, arguments, callbacks.callbacks)
    trainer.non_finite, trainer.saver = callbacks.non_finite, callbacks.saver
    share_rows(trainer.accelerator, context.plan.choice.group_size)
    return trainer, callbacks.stop


def make_sft_trainer(
    context: RankContext, arguments: TrainingArguments, callbacks: list[TrainerCallback]
) -> ShardedTrainer:
    """Return the Trainer of supervised fine-tuning."""
    rundir, plan = context.attempt.rundir, context.plan
    return ShardedTrainer(
        model=load_model(context.settings),
        args=arguments,
        train_dataset=WholeBatches(Sequences(rundir.data, "train"), plan.choice.global_batch_size),
        eval_dataset=Sequences(rundir.data, "eval"),
        data_collator=_collator(context),
        processing_class=load_tokenizer(context.settings),
        optimizer_cls_and_kwargs=planned_optimizer(context.settings),
        callbacks=callbacks,
    )


def _collator(context: RankContext) -> Collator | PartCollator:
    plan = context.plan
    whole, ranks = collator(context.attempt.rundir.data, plan.workload.attention), plan.choice.sequence_parallel
    return PartCollator(whole, context.rank % ranks, ranks) if ranks > 1 else whole


class EngineCheck(TrainerCallback):
    """Compare the engine with the plan before the first step, and restore the losses that were not logged."""

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
        elif isinstance(collate, Collator):
            dtype = getattr(torch, self.context.settings.expected.dtype)
            check_isolation(built.model, collate, args.device, dtype)
        if resume_from := self.context.attempt.resume_from:  # Trainer has just emptied the window
            self.trainer.restore_loss_window(Path(resume_from))
