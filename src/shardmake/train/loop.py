"""Train one rank in a plain loop over Accelerate that users can read and change; `engine: loop` in the run.

The loop uses the same arguments, data order, loss and optimizer as Trainer, so the same seed gives the same losses. It
also writes the same checkpoints (`shardmake.train.checkpoint_files`), so a run can resume under the other engine.
"""

import math
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
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.integrations.liger import apply_liger_kernel
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from transformers.trainer_utils import align_special_tokens

from shardmake.data.dataset import check_isolation, collator, load
from shardmake.run.training_settings import TrainingSettings
from shardmake.train import checkpoint_files
from shardmake.train.learning_check import BuiltTraining
from shardmake.train.library_patches import kept_matmul_precision
from shardmake.train.load_model import load_model, load_tokenizer
from shardmake.train.process_group import extend_timeouts, leave_together
from shardmake.train.training_setup import (
    TrainingCallbacks,
    WholeBatches,
    check_ready,
    make_callbacks,
    planned_optimizer,
    record_completion,
    start_rank,
    training_arguments,
)

Batch = dict[str, Any]


def train(attempt_folder: Path) -> None:
    """Run this rank of the attempt in ``attempt_folder`` to its end."""
    context, heartbeat = start_rank(attempt_folder)
    attempt, plan, settings = context.attempt, context.plan, context.settings
    arguments = training_arguments(context)
    with kept_matmul_precision():
        accelerator = make_accelerator(arguments)
    tokenizer = load_tokenizer(settings)
    model = prepare_model(load_model(settings), tokenizer, arguments)
    optimizer = make_optimizer(model, arguments, settings)
    collate = collator(attempt.rundir.data, plan.workload.attention)
    data = WholeBatches(load(attempt.rundir.data, "train"), plan.choice.global_batch_size)
    loader = DataLoader(data, arguments.train_batch_size, sampler=make_sampler(data, arguments), collate_fn=collate)
    batches = accelerator.prepare(loader)
    eval_data = DataLoader(load(attempt.rundir.data, "eval"), arguments.eval_batch_size, collate_fn=collate)
    eval_batches = accelerator.prepare(eval_data)
    model, optimizer = accelerator.prepare(model, optimizer)
    extend_timeouts(arguments.ddp_timeout_delta)
    callbacks = make_callbacks(context, heartbeat)

    loop = Loop(accelerator, model, optimizer, batches, eval_batches, arguments, tokenizer, callbacks)
    built = BuiltTraining(
        model=model,
        optimizer=optimizer,
        scheduler=loop.scheduler,
        batches=batches,
        arguments=arguments,
        precision=accelerator.mixed_precision,
        autocasts=accelerator.native_amp,
        steps=loop.state.max_steps,
    )
    check_ready(context, built)
    check_isolation(built.model, collate, accelerator.device, getattr(torch, settings.expected.dtype))
    loop.run(Path(attempt.resume_from) if attempt.resume_from else None)
    if context.rank == 0:
        record_completion(context, loop.state, stopped=callbacks.stop.requested)
    leave_together()


class Loop:
    """The training loop over micro batches, steps and epochs, with logging, evaluation and saves between the steps."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        optimizer: Any,
        batches: Any,
        eval_batches: Any,
        arguments: TrainingArguments,
        tokenizer: Any,
        callbacks: TrainingCallbacks,
    ) -> None:
        self.accelerator, self.model, self.optimizer, self.arguments = accelerator, model, optimizer, arguments
        self.batches, self.eval_batches, self.tokenizer = batches, eval_batches, tokenizer
        self.non_finite, self.saver = callbacks.non_finite, callbacks.saver
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
        trackers = get_reporting_integration_callbacks(arguments.report_to)
        ordered = [DefaultFlowCallback(), *trackers, *callbacks.callbacks]
        self.callbacks = CallbackHandler(ordered, model, tokenizer, optimizer, self.scheduler)
        self.loss_sum = torch.zeros((), device=accelerator.device)
        self.logged_step = 0

    def run(self, resume_from: Path | None) -> None:
        """Train to the last step, or until a callback requests a stop."""
        if resume_from:
            checkpoint_files.load(self, resume_from)
        self.control = self.callbacks.on_train_begin(self.arguments, self.state, self.control)
        while self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            for batches in self.rest_of_epoch():
                self.control = self.callbacks.on_step_begin(self.arguments, self.state, self.control)
                norm = self.step(batches)
                self.state.global_step += 1
                self.state.epoch = self.state.global_step / self.steps_per_epoch
                self.control = self.callbacks.on_step_end(self.arguments, self.state, self.control)
                self.log_evaluate_save(norm)
                if self.control.should_training_stop:
                    break
        self.control = self.callbacks.on_train_end(self.arguments, self.state, self.control)

    def rest_of_epoch(self) -> Iterator[list[Batch]]:
        """Yield the micro batches of each remaining step of this epoch."""
        epoch, done = divmod(self.state.global_step, self.steps_per_epoch)
        size = self.arguments.gradient_accumulation_steps
        batches = self.accelerator.skip_first_batches(self.batches, done * size) if done else self.batches
        batches.set_epoch(epoch)
        remaining = iter(batches)
        with torch.random.fork_rng(devices=[], enabled=done > 0):  # the epoch drew its loader's seed when it began
            group = list(islice(remaining, size))
        while group:
            yield group
            group = list(islice(remaining, size))

    def step(self, batches: list[Batch]) -> Any:
        """Take one optimizer step over ``batches``; return the gradient norm."""
        self.model.train()
        accelerator, tokens = self.accelerator, self.count_tokens(batches)
        loss_of_step = torch.zeros((), device=accelerator.device)
        for index, batch in enumerate(batches, start=1):
            is_last = index == len(batches)
            accelerator.gradient_state._set_sync_gradients(is_last)
            with nullcontext() if is_last or self.is_deepspeed else accelerator.no_sync(self.model):
                loss = self.loss(batch, tokens)
                accelerator.backward(loss, **({"scale_wrt_gas": False} if self.is_deepspeed else {}))
            loss_of_step += loss.detach()
            self.non_finite.add_loss(loss)
            if not is_last:
                self.control = self.callbacks.on_substep_end(self.arguments, self.state, self.control)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), self.arguments.max_grad_norm)
        self.optimizer.step()
        self.non_finite.set_norm(norm)
        self.loss_sum += loss_of_step
        return norm

    def count_tokens(self, batches: list[Batch]) -> torch.Tensor:
        """Return the number of tokens with a loss in ``batches`` of all ranks."""
        own = sum((batch["labels"][..., 1:] != -100).sum() for batch in batches)
        return self.accelerator.gather(torch.as_tensor(own, device=self.accelerator.device)).sum()

    def loss(self, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the mean over ``tokens``, times the world size; the engines average it."""
        return self.model(**batch, num_items_in_batch=tokens).loss * self.accelerator.num_processes

    @property
    def is_deepspeed(self) -> bool:
        """Return True if DeepSpeed accumulates the gradients."""
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def log_evaluate_save(self, norm: Any) -> None:
        """Update the learning rate after a step; then log, evaluate and save if due."""
        rate = self.scheduler.get_last_lr()[0]
        if not self.accelerator.optimizer_step_was_skipped:
            self.scheduler.step()
        self.optimizer.zero_grad()
        if self.control.should_log:
            loss = self.accelerator.gather(self.loss_sum).mean().item() / (self.state.global_step - self.logged_step)
            self.loss_sum.zero_()
            self.logged_step = self.state.global_step
            self.log({"loss": loss, "grad_norm": float(norm), "learning_rate": rate})
        if self.control.should_evaluate:
            self.log({"eval_loss": self.evaluate()})
            self.control = self.callbacks.on_evaluate(self.arguments, self.state, self.control, metrics={})
        if self.control.should_save:
            self.save()
            self.control = self.callbacks.on_save(self.arguments, self.state, self.control)

    def save(self) -> None:
        """Write a checkpoint to the folder that the saver provides, which commits it."""
        newest = self.state.log_history[-1] if self.state.log_history else {}
        loss = newest.get("eval_loss") if newest.get("step") == self.state.global_step else None
        required = self.control.should_training_stop
        with self.saver.saving(self.state.global_step, required=required, eval_loss=loss) as folder:
            if folder is not None:
                checkpoint_files.save(self, folder)

    def log(self, values: dict[str, float]) -> None:
        """Add ``values`` to the state's history, and pass them to the callbacks."""
        self.state.log_history.append({**values, "step": self.state.global_step})
        self.control = self.callbacks.on_log(self.arguments, self.state, self.control, logs=values)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the evaluation sequences; within one pass of all ranks it is weighted by tokens."""
        self.model.eval()
        losses = []
        for batch in self.eval_batches:
            # Outside training Liger also returns the logits of all positions, unless it gets this.
            options = {"skip_logits": True} if self.arguments.use_liger_kernel else {}
            loss = self.loss({**batch, **options}, self.count_tokens([batch]))
            losses.append(self.accelerator.gather_for_metrics(loss.repeat(self.arguments.eval_batch_size)))
            self.control = self.callbacks.on_prediction_step(self.arguments, self.state, self.control)
        return torch.cat(losses).mean().item()


def make_sampler(data: WholeBatches, arguments: TrainingArguments) -> Sampler[int]:
    """Return the order of ``data`` as Trainer has it: as it lies on disk, or shuffled by the seed and the epoch."""
    return SequentialSampler(data) if arguments.train_sampling_strategy == "sequential" else RandomSampler(data)


def make_accelerator(arguments: TrainingArguments) -> Accelerator:
    """Return an Accelerator with the engine of the plan; the loop itself accumulates the gradients."""
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
    """Set the tokenizer's special tokens, fused kernels and activation checkpointing on ``model``, and return it."""
    align_special_tokens(model, tokenizer)
    if arguments.use_liger_kernel:
        apply_liger_kernel(model, arguments.liger_kernel_config)
    if arguments.activation_checkpointing:
        options = dict(arguments.activation_checkpointing_kwargs or {})
        offload = options.pop("offload", False)
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options, offload=offload)
    return model


def make_optimizer(
    model: torch.nn.Module, arguments: TrainingArguments, settings: TrainingSettings
) -> torch.optim.Optimizer:
    """Return the planned optimizer, without weight decay for vectors (norms, biases), as in Trainer."""
    optimizer_class, options = planned_optimizer(settings) or Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A tensor that ZeRO-3 has sharded is flat; `ds_shape` is its original shape.
    is_matrix = [len(getattr(parameter, "ds_shape", parameter.shape)) > 1 for parameter in trained]
    groups = [
        {
            "params": [p for p, matrix in zip(trained, is_matrix, strict=True) if matrix == decays],
            "weight_decay": arguments.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    return optimizer_class(groups, **options)
