"""One rank of a training: load, check the engine, train, seal, and on rank 0 write the receipt as the last act."""

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import TrainerCallback

from shardmake.core.atomic import read_json
from shardmake.data.dataset import collator, load
from shardmake.run.attempt import Attempt, AttemptDir, rank_report
from shardmake.run.plan import Plan
from shardmake.train.callbacks import HeartbeatCallback, StopOnRequest
from shardmake.train.checkpoint_saver import CommittingTrainer
from shardmake.train.data_order import WholeBatches
from shardmake.train.engine_check import environment_report
from shardmake.train.non_finite import NonFiniteCheck
from shardmake.train.process_group import extend_timeouts, leave_together
from shardmake.train.setup import (
    check_ready,
    descriptions,
    load_model,
    load_tokenizer,
    make_callbacks,
    named_optimizer,
    training_arguments,
    write_end,
)


class ShardedTrainer(CommittingTrainer):
    """A Trainer whose checkpoints of a sharded engine hold the weights once.

    Transformers saves them a second time, gathered on rank 0 (ZeRO-1, ZeRO-2) or as a second sharded checkpoint
    (ZeRO-3); here only what a model folder has beside the weights is written along. ``guard`` sees every loss and
    gradient norm.
    """

    guard: NonFiniteCheck

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one micro batch; the loss is shown to the guard."""
        loss = super().training_step(*args, **kwargs)
        self.guard.see_loss(loss)
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """The step's gradient norm, shown to the guard."""
        norm = super()._get_grad_norm(*args, **kwargs)
        self.guard.see_norm(norm)
        return norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write config and tokenizer; the weights too where the engine does not shard."""
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            super().save_model(output_dir, _internal_call)
            return
        folder = output_dir or self.args.output_dir
        assert folder is not None
        if self.args.should_save:
            model = self.accelerator.unwrap_model(self.model)
            for part in descriptions(model):
                part.save_pretrained(folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)


def train(attempt_folder: Path) -> None:
    """Run this rank of the attempt in ``attempt_folder`` to its end."""
    folder = AttemptDir(attempt_folder)
    attempt = folder.read()
    rank = int(os.environ.get("RANK", "0"))
    heartbeat = HeartbeatCallback(folder, rank)
    heartbeat.beat("load", 0)
    rank_report(folder, rank, environment_report())
    plan = Plan.read(folder.plan)
    settings = read_json(folder.training, "shardmake train NAME")
    trainer, stop = _make_trainer(folder, attempt, plan, settings, heartbeat)
    trainer.add_callback(_Gate(folder, rank, settings["expected"], trainer))
    trainer.train(resume_from_checkpoint=attempt.resume_from)
    if rank == 0:
        write_end(folder, attempt, trainer.state, stopped=stop.requested)
    leave_together()


def _make_trainer(
    folder: AttemptDir, attempt: Attempt, plan: Plan, settings: dict[str, Any], heartbeat: HeartbeatCallback
) -> tuple[ShardedTrainer, StopOnRequest]:
    rundir = attempt.rundir
    # The arguments come before the model: they tell Transformers to load it sharded.
    arguments = training_arguments(settings, folder, attempt)
    model = load_model(settings)
    watch = make_callbacks(folder, attempt, plan, settings, heartbeat)
    trainer = ShardedTrainer(
        model=model,
        args=arguments,
        train_dataset=WholeBatches(load(rundir.data, "train"), plan.choice.global_batch_size),
        eval_dataset=load(rundir.data, "eval"),
        data_collator=collator(rundir.data, plan.workload.attention),
        processing_class=load_tokenizer(settings),
        optimizer_cls_and_kwargs=named_optimizer(settings),
        callbacks=watch.callbacks,
    )
    trainer.guard, trainer.saver = watch.guard, watch.saver
    _share_data(trainer, plan.choice.tensor_parallel)
    return trainer, watch.stop


def _share_data(trainer: ShardedTrainer, tensor_parallel: int) -> None:
    """Give the ranks of a tensor-parallel group the same batches.

    Accelerate's data loaders look for this mesh, but Accelerate itself makes it only once they are there already, so
    that each rank of a group would get other data, without a word.
    """
    if tensor_parallel > 1:
        shape = (trainer.args.world_size // tensor_parallel, tensor_parallel)
        mesh = init_device_mesh(trainer.args.device.type, shape, mesh_dim_names=("dp", "tp"))
        trainer.accelerator.state.ds_device_mesh = mesh


class _Gate(TrainerCallback):
    """Placed before the first step: report what came up and refuse to train anything else than the plan."""

    def __init__(self, folder: AttemptDir, rank: int, expected: dict[str, Any], trainer: ShardedTrainer) -> None:
        self.folder, self.rank, self.expected, self.trainer = folder, rank, expected, trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare and, if anything differs, raise on every rank."""
        extend_timeouts(args.ddp_timeout_delta)
        wrapped, precision = self.trainer.model_wrapped, self.trainer.accelerator.mixed_precision
        collate: Any = self.trainer.data_collator
        check_ready(self.folder, self.rank, self.expected, wrapped, precision, collate, args.device)
