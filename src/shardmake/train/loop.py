"""One rank of a training by a plain loop over Accelerate, to read and to change; `engine: loop` in the run.

It takes the same arguments, data order, loss and optimizer as Trainer, so the same seed gives the same losses, and it
writes the same checkpoints (`shardmake.train.checkpoint_files`): a run may go on under the other one.
"""

import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
)
from torch.utils.data import DataLoader, RandomSampler
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.integrations.liger import apply_liger_kernel
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from transformers.trainer_utils import align_special_tokens

from shardmake.core.atomic import read_json
from shardmake.data.dataset import collator, load
from shardmake.run.attempt import AttemptDir, rank_report
from shardmake.run.plan import Plan
from shardmake.train import checkpoint_files
from shardmake.train.callbacks import HeartbeatCallback
from shardmake.train.data_order import WholeBatches
from shardmake.train.engine_check import environment_report
from shardmake.train.process_group import extend_timeouts, leave_together
from shardmake.train.setup import (
    TrainingCallbacks,
    check_ready,
    load_model,
    load_tokenizer,
    make_callbacks,
    named_optimizer,
    training_arguments,
    write_end,
)

Batch = dict[str, Any]


def train(attempt_folder: Path) -> None:
    """Run this rank of the attempt in ``attempt_folder`` to its end."""
    folder = AttemptDir(attempt_folder)
    attempt, plan = folder.read(), Plan.read(folder.plan)
    settings = read_json(folder.training, "shardmake train NAME")
    rank = int(os.environ.get("RANK", "0"))
    heartbeat = HeartbeatCallback(folder, rank)
    heartbeat.beat("load", 0)
    rank_report(folder, rank, environment_report())

    arguments = training_arguments(settings, folder, attempt)
    accelerator = make_accelerator(arguments)
    tokenizer = load_tokenizer(settings)
    model = prepare_model(load_model(settings), tokenizer, arguments)
    optimizer = make_optimizer(model, arguments, settings)
    collate = collator(attempt.rundir.data, plan.workload.attention)
    data = WholeBatches(load(attempt.rundir.data, "train"), plan.choice.global_batch_size)
    batches = make_batches(accelerator, data, collate, arguments)
    eval_data = DataLoader(load(attempt.rundir.data, "eval"), arguments.eval_batch_size, collate_fn=collate)
    eval_batches = accelerator.prepare(eval_data)
    model, optimizer = accelerator.prepare(model, optimizer)
    extend_timeouts(arguments.ddp_timeout_delta)
    watch = make_callbacks(folder, attempt, plan, settings, heartbeat)

    loop = Loop(accelerator, model, optimizer, batches, eval_batches, arguments, tokenizer, watch)
    check_ready(folder, rank, settings["expected"], model, accelerator.mixed_precision, collate, accelerator.device)
    loop.run(Path(attempt.resume_from) if attempt.resume_from else None)
    if rank == 0:
        write_end(folder, attempt, loop.state, stopped=watch.stop.requested)
    leave_together()


def make_accelerator(arguments: TrainingArguments) -> Accelerator:
    """The engine of the plan; `Loop.step` counts accumulated gradients itself."""
    fsdp = arguments.fsdp_plugin_args
    return Accelerator(
        mixed_precision=arguments.mixed_precision,
        deepspeed_plugin=arguments.deepspeed_plugin,
        fsdp_plugin=FullyShardedDataParallelPlugin(**fsdp) if fsdp is not None else None,
        dynamo_plugin=TorchDynamoPlugin(backend=arguments.torch_compile_backend, mode=arguments.torch_compile_mode),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=arguments.data_seed),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=False)],
    )


def prepare_model(model: Any, tokenizer: Any, arguments: TrainingArguments) -> Any:
    """``model`` with the tokenizer's special tokens, and fused kernels and activation checkpointing where asked for."""
    align_special_tokens(model, tokenizer)
    if arguments.use_liger_kernel:
        apply_liger_kernel(model, arguments.liger_kernel_config)
    if arguments.activation_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments.activation_checkpointing_kwargs)
    return model


def make_batches(accelerator: Accelerator, data: Any, collate: Any, arguments: TrainingArguments) -> Any:
    """This rank's micro batches, shuffled anew each epoch; the order depends on the seed alone."""
    size = arguments.train_batch_size
    return accelerator.prepare(DataLoader(data, size, sampler=RandomSampler(data), collate_fn=collate))


def make_optimizer(
    model: torch.nn.Module, arguments: TrainingArguments, settings: dict[str, Any]
) -> torch.optim.Optimizer:
    """The planned optimizer; weight decay spares vectors (norms, biases), as in Trainer."""
    kind, options = named_optimizer(settings) or Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A tensor that ZeRO-3 has sharded is flat; its shape is kept beside it.
    is_matrix = [len(getattr(parameter, "ds_shape", parameter.shape)) > 1 for parameter in trained]
    groups = [
        {
            "params": [p for p, matrix in zip(trained, is_matrix, strict=True) if matrix == decays],
            "weight_decay": arguments.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    return kind(groups, **options)


class Loop:
    """The training itself: micro batches to steps, steps to epochs, and what happens between them."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        optimizer: Any,
        batches: Any,
        eval_batches: Any,
        arguments: TrainingArguments,
        tokenizer: Any,
        watch: TrainingCallbacks,
    ) -> None:
        self.accelerator, self.model, self.optimizer, self.arguments = accelerator, model, optimizer, arguments
        self.batches, self.eval_batches, self.tokenizer = batches, eval_batches, tokenizer
        self.guard, self.saver = watch.guard, watch.saver
        self.steps_per_epoch = math.ceil(len(batches) / arguments.gradient_accumulation_steps)
        steps = arguments.max_steps
        if steps < 0:
            steps = math.ceil(arguments.num_train_epochs * self.steps_per_epoch)
        warmup = arguments.get_warmup_steps(steps)
        self.scheduler = get_scheduler(arguments.lr_scheduler_type, optimizer, warmup, steps)
        self.control = TrainerControl()
        self.state = TrainerState(max_steps=steps, stateful_callbacks=[self.control])
        self.state.train_batch_size = arguments.train_batch_size
        self.state.is_world_process_zero = accelerator.is_main_process
        self.state.compute_steps(arguments, steps)
        watching = [DefaultFlowCallback(), *get_reporting_integration_callbacks(arguments.report_to), *watch.callbacks]
        self.watching = CallbackHandler(watching, model, tokenizer, optimizer, self.scheduler)
        self.losses: list[torch.Tensor] = []

    def run(self, resume_from: Path | None) -> None:
        """Train to the last step, or until the watching callbacks want to stop."""
        if resume_from:
            checkpoint_files.load(self, resume_from)
        self.control = self.watching.on_train_begin(self.arguments, self.state, self.control)
        while self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            for batches in self.rest_of_epoch():
                self.control = self.watching.on_step_begin(self.arguments, self.state, self.control)
                norm = self.step(batches)
                self.state.global_step += 1
                self.state.epoch = self.state.global_step / self.steps_per_epoch
                self.control = self.watching.on_step_end(self.arguments, self.state, self.control)
                self.log_evaluate_save(norm)
                if self.control.should_training_stop:
                    break
        self.control = self.watching.on_train_end(self.arguments, self.state, self.control)

    def rest_of_epoch(self) -> Iterator[list[Batch]]:
        """The micro batches of each step that this epoch still has."""
        epoch, done = divmod(self.state.global_step, self.steps_per_epoch)
        size = self.arguments.gradient_accumulation_steps
        batches = self.accelerator.skip_first_batches(self.batches, done * size) if done else self.batches
        batches.set_epoch(epoch)
        remaining = iter(batches)
        while group := list(islice(remaining, size)):
            yield group

    def step(self, batches: list[Batch]) -> Any:
        """One optimizer step over ``batches``; the gradient's norm."""
        self.model.train()
        accelerator, tokens = self.accelerator, self.count(batches)
        loss_of_step = torch.zeros((), device=accelerator.device)
        for index, batch in enumerate(batches, start=1):
            is_last = index == len(batches)
            accelerator.gradient_state._set_sync_gradients(is_last)
            with nullcontext() if is_last or self.is_deepspeed else accelerator.no_sync(self.model):
                loss = self.loss(batch, tokens)
                accelerator.backward(loss, **({"scale_wrt_gas": False} if self.is_deepspeed else {}))
            loss_of_step += loss.detach()
            self.guard.see_loss(loss)
            if not is_last:
                self.control = self.watching.on_substep_end(self.arguments, self.state, self.control)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), self.arguments.max_grad_norm)
        self.optimizer.step()
        self.guard.see_norm(norm)
        self.losses.append(loss_of_step)
        return norm

    def count(self, batches: list[Batch]) -> torch.Tensor:
        """Tokens that carry loss in ``batches`` of all ranks."""
        mine = sum((batch["labels"][..., 1:] != -100).sum() for batch in batches)
        return self.accelerator.gather(torch.as_tensor(mine, device=self.accelerator.device)).sum()

    def loss(self, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean over ``tokens``, times the ranks: the engines average over them."""
        return self.model(**batch, num_items_in_batch=tokens).loss * self.accelerator.num_processes

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed keeps gradients and steps."""
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def log_evaluate_save(self, norm: Any) -> None:
        """End a step: the learning rate moves on, and what is due is done."""
        rate = self.scheduler.get_last_lr()[0]
        if not self.accelerator.optimizer_step_was_skipped:
            self.scheduler.step()
        self.optimizer.zero_grad()
        if self.control.should_log:
            loss = self.accelerator.gather(torch.stack(self.losses)).mean().item()
            self.losses.clear()
            self.log({"loss": loss, "grad_norm": float(norm), "learning_rate": rate})
        if self.control.should_evaluate:
            self.log({"eval_loss": self.evaluate()})
            self.control = self.watching.on_evaluate(self.arguments, self.state, self.control, metrics={})
        if self.control.should_save:
            self.save()
            self.control = self.watching.on_save(self.arguments, self.state, self.control)

    def save(self) -> None:
        """Have the saver make room, and write the checkpoint there; it counts once it is whole."""
        newest = self.state.log_history[-1] if self.state.log_history else {}
        loss = newest.get("eval_loss") if newest.get("step") == self.state.global_step else None
        must = self.control.should_training_stop
        with self.saver.saving(self.state.global_step, must=must, eval_loss=loss) as folder:
            if folder is not None:
                checkpoint_files.save(self, folder)

    def log(self, values: dict[str, float]) -> None:
        """Keep ``values`` in the state, and show them to whoever watches."""
        self.state.log_history.append({**values, "step": self.state.global_step})
        self.control = self.watching.on_log(self.arguments, self.state, self.control, logs=values)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the evaluation sequences; those in one pass of all ranks count by their tokens."""
        self.model.eval()
        losses = []
        for batch in self.eval_batches:
            loss = self.loss(batch, self.count([batch])).repeat(self.arguments.eval_batch_size)
            losses.append(self.accelerator.gather_for_metrics(loss))
            self.control = self.watching.on_prediction_step(self.arguments, self.state, self.control)
        return torch.cat(losses).mean().item()
