"""Train one rank with transformers' Trainer: load, check the engine, train, and write the receipt on rank 0."""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments

from shardmake.checkpoint import store
from shardmake.checkpoint.training_receipt import write_training_receipt
from shardmake.config.objectives import OBJECTIVES
from shardmake.core.atomic import read_json
from shardmake.core.environment import leave_collectives_to_gloo
from shardmake.core.private_names import named_arguments
from shardmake.data.dataset import Collator, Sequences, check_isolation, collator
from shardmake.run.attempt import RequestedStop, rank_report, room_timeout
from shardmake.train.async_saver import ScratchFolder, share_of_node
from shardmake.train.callbacks.heartbeat import HeartbeatCallback
from shardmake.train.callbacks.metrics import MetricsCallback
from shardmake.train.callbacks.non_finite import NonFiniteCheck
from shardmake.train.callbacks.recorders import recorders
from shardmake.train.callbacks.save_scheduler import EarlyStop, SaveScheduler, StopOnRequest
from shardmake.train.checkpoint_saver import Saver
from shardmake.train.engine_check import check_engine, describe_engine, environment_report
from shardmake.train.fsdp_precision import fsdp_policy
from shardmake.train.learning_check import (
    BuiltTraining,
    check_deepspeed_file,
    check_learning,
    describe_learning,
    planned_learning,
)
from shardmake.train.library_patches import import_deepspeed, share_rows
from shardmake.train.load_model import load_model, load_tokenizer
from shardmake.train.muon import find_pieces
from shardmake.train.process_group import extend_timeouts, leave_together
from shardmake.train.rank_context import RankContext
from shardmake.train.sequence_parallel import PartCollator, share_sequences
from shardmake.train.sharded_trainer import ShardedTrainer, WholeBatches, planned_optimizer
from shardmake.train.trackers import PROJECT, prepare_trackers

# Bind a rank that computes on the host to the cores near its GPU, whose memory the GPU reaches fastest.
#
# Accelerate's ``--enable_cpu_affinity`` numbers GPUs without regard to ``CUDA_VISIBLE_DEVICES`` and ends the rank if
# the job may not use those cores. torch's own binding is an option of torchrun and needs numactl.

logger = logging.getLogger(__name__)

WRAPPED_CLASSES = "transformer_cls_names_to_wrap"
PCI_DEVICES = Path("/sys/bus/pci/devices")


def train(attempt_folder: Path) -> None:
    """Run this rank of the attempt in ``attempt_folder`` to its end."""
    context = RankContext.load(attempt_folder)
    heartbeat = HeartbeatCallback(context.folder, context.rank)
    heartbeat.beat("load", 0)
    rank_report(context.folder, context.rank, environment_report())
    trainer, stop = _make_trainer(context, heartbeat)
    patience = context.settings.checkpoints.early_stopping
    stops = [EarlyStop(patience)] if patience else []
    for callback in (EngineCheck(context, trainer), *trainer.after_check, *recorders(context), *stops):
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=context.attempt.resume_from)
    if context.rank == 0:
        record_completion(context, trainer.state, stopped=stop.requested)
    leave_together()


def import_libraries(attempt_folder: Path) -> None:
    """Import what a training such as that of ``attempt_folder`` imports beside this module, without its data.

    Raises:
        RuntimeError: a library starts CUDA, which would hold memory of the GPU while the present rank trains.
    """
    context = RankContext.load(attempt_folder)
    refusal = "A rank that is kept ready must not start CUDA."
    with mock.patch.object(torch.cuda, "_lazy_init", side_effect=RuntimeError(refusal)) as start:
        _import_engine(context)
        if OBJECTIVES[context.settings.objective].trl:
            import_module("shardmake.train.preferences")
        context.settings.model.model_class.find()
        load_tokenizer(context.settings)
    if start.called:  # a library that has ignored the error may have taken the CPU instead
        raise RuntimeError(refusal)


def _import_engine(context: RankContext) -> None:
    if context.plan.choice.is_deepspeed:
        import_deepspeed()
        if context.attempt.accelerator == "cpu":
            leave_collectives_to_gloo()


def _make_trainer(context: RankContext, heartbeat: HeartbeatCallback) -> tuple[ShardedTrainer, StopOnRequest]:
    # The arguments come before the model: transformers reads them to load the model sharded.
    arguments = training_arguments(context)
    callbacks = make_callbacks(context, heartbeat)
    non_finite, _, stop, scheduler, *_ = callbacks
    trainer: ShardedTrainer
    if OBJECTIVES[context.settings.objective].trl is None:
        trainer = make_sft_trainer(context, arguments, [*callbacks])
    else:
        from shardmake.train.preferences import make_trl_trainer  # the import of TRL takes seconds

        trainer = make_trl_trainer(context, arguments, [*callbacks])
    trainer.non_finite, trainer.saver = non_finite, scheduler.saver
    trainer.learning_rates = context.settings.learning_rates
    share_rows(trainer.accelerator, context.plan.choice.group_size)
    return trainer, stop


def make_sft_trainer(
    context: RankContext, arguments: TrainingArguments, callbacks: list[TrainerCallback]
) -> ShardedTrainer:
    """Return the Trainer of supervised fine-tuning."""
    rundir, plan = context.attempt.rundir, context.plan
    return ShardedTrainer(
        model=load_model(context.settings, arguments),
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
        find_pieces(built.model)
        if isinstance(collate, PartCollator):
            group = accelerator.state.ds_device_mesh["tp"].get_group()
            share_sequences(built.model, collate, group, self.context.plan.choice.micro_batch_size, args.device)
        elif isinstance(collate, Collator):
            dtype = getattr(torch, self.context.settings.expected.dtype)
            check_isolation(built.model, collate, args.device, dtype)
        if resume_from := self.context.attempt.resume_from:  # Trainer has just emptied the window
            self.trainer.restore_loss_window(Path(resume_from))


def training_arguments(context: RankContext) -> TrainingArguments:
    """Return the rendered arguments with the attempt's paths.

    Create them before the model: transformers reads them to decide whether to load the model sharded.
    """
    attempt = context.attempt
    _import_engine(context)
    arguments = named_arguments(context.settings.arguments)
    if read_json(context.folder.deepspeed, "shardmake train NAME"):
        arguments["deepspeed"] = str(context.folder.deepspeed)
    prepare_trackers(attempt, arguments["report_to"])
    if arguments["torch_compile"]:
        compile_layers()
    kind = trl_arguments(context, trl) if (trl := OBJECTIVES[context.settings.objective].trl) else TrainingArguments
    made = kind(output_dir=str(attempt.rundir.checkpoints), run_name=attempt.rundir.name, project=PROJECT, **arguments)
    if made.fsdp_plugin_args is not None:
        made.fsdp_plugin_args["mixed_precision_policy"] = fsdp_policy(context.settings.expected)
        if context.settings.expected.expert_parallel:  # FSDP has renamed the classes before Accelerate finds them
            wrapped = f"FSDP{made.fsdp_plugin_args[WRAPPED_CLASSES].replace(',', ',FSDP')}"
            made.fsdp_plugin_args[WRAPPED_CLASSES] = wrapped
    if made.device.type == "cuda" and context.plan.choice.spec.offload_optimizer:
        bind_to_gpu(made.device)
    return made


def compile_layers() -> None:
    """Let Accelerate compile layer by layer, under DeepSpeed too, to which its launcher hands no such setting.

    All layers share the kernels of one, which compile in seconds. As a whole, a model of 1.24B had no second step after
    80 s on an H200, and under FSDP it would bypass the hooks that gather each layer.
    """
    os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"


def trl_arguments(context: RankContext, name: str) -> Callable[..., TrainingArguments]:
    """Return TRL's class of training arguments that begins with ``name``, with the settings of the objective."""
    import trl

    settings = context.settings
    section = settings.objective_settings
    length, checkpointing = context.plan.workload.sequence_length, settings.arguments["activation_checkpointing"]
    # TRL turns checkpointing on under its old name, which it also reads.
    planned = {"max_length": length, "gradient_checkpointing": checkpointing}
    return partial(getattr(trl, f"{name}Config"), **planned, **(section.trl_arguments() if section else {}))


def make_callbacks(
    context: RankContext, heartbeat: HeartbeatCallback
) -> tuple[NonFiniteCheck, MetricsCallback, StopOnRequest, SaveScheduler, HeartbeatCallback]:
    """Return the callbacks of one attempt on this rank, in the order in which they are called."""
    attempt, plan, settings = context.attempt, context.plan, context.settings
    rundir, global_batch_size = attempt.rundir, plan.choice.global_batch_size
    sequences = global_batch_size * OBJECTIVES[settings.objective].sequences
    tokens_per_step = sequences * plan.workload.sequence_length

    def describe(step: int) -> dict[str, Any]:
        return {
            "tokens": step * tokens_per_step,
            "samples": step * global_batch_size,
            "data_seed": settings.arguments["data_seed"],
            "world_size": attempt.world_size,
            "strategy": plan.choice.strategy,
            "attempt": attempt.number,
            "settings_digest": attempt.settings_digest,
        }

    non_finite, stop = NonFiniteCheck(context.rank), StopOnRequest([rundir.stop_file, context.folder.stop_file])
    metrics = MetricsCallback(rundir.metrics, tokens_per_step, attempt.number)
    checkpoints = settings.checkpoints
    saver = Saver(
        rundir.checkpoints,
        describe,
        checkpoints.retention,
        attempt.checkpoint_bytes,
        _scratch_folder(context) if checkpoints.asynchronous else None,
        room_timeout(attempt.hang_seconds),
        context.folder,
    )
    return non_finite, metrics, stop, SaveScheduler(saver, checkpoints.mtbf_seconds), heartbeat


def _scratch_folder(context: RankContext) -> ScratchFolder:
    """Return the scratch folder of this rank's node; in tests, several nodes share one machine."""
    attempt = context.attempt
    node = context.rank // attempt.processes_per_node
    share = share_of_node(context.plan.choice, node)
    return ScratchFolder(
        attempt.saves / f"node-{node}", attempt.private, context.folder.root, node, attempt.nodes, share
    )


def check_ready(context: RankContext, built: BuiltTraining) -> None:
    """Write this rank's report before the first step, and raise if engine or settings are not the planned ones.

    Rank 0 also writes what the training learns with, for the receipt and the card.
    """
    settings, choice = context.settings, context.plan.choice
    found = describe_engine(built.model, built.precision)
    rank_report(context.folder, context.rank, environment_report() | found.as_json())
    check_engine(found, settings.expected)
    learning = describe_learning(built, settings)
    rank_report(context.folder, context.rank, environment_report() | found.as_json() | {"learning": learning.as_json()})
    check_learning(learning, planned_learning(settings, choice, built.arguments, built.steps))
    check_deepspeed_file(built.model, read_json(context.folder.deepspeed, "shardmake train NAME"))
    if context.rank == 0:
        learning.write(context.folder.learning)


def record_completion(context: RankContext, state: TrainerState, *, stopped: bool) -> None:
    """Write the receipt if the last step is committed; after a requested stop, write the stop note instead."""
    rundir = context.attempt.rundir
    newest = next(store.committed(rundir.checkpoints), None)
    step = newest[0].step if newest else 0
    if state.global_step < state.max_steps:
        assert stopped, f"training ended at step {state.global_step} of {state.max_steps}, but no stop was requested"
        RequestedStop(step=step, time=time.time()).write(context.folder.stopped)
        return
    if newest is None or step != state.global_step:
        raise RuntimeError(f"The last step {state.global_step} was not saved. The newest checkpoint is of step {step}.")
    write_training_receipt(rundir, *newest)


def bind_to_gpu(device: torch.device) -> None:
    """Bind all threads of this process to the cores near ``device`` that the job may use.

    Without such cores, the process stays as it is, and the log says so.
    """
    found: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the address
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    near = cores_near(address) & allowed
    if not near:
        logger.warning("Not bound to the cores near GPU %s: the job may use none of them, or none is known.", address)
    elif near != allowed:
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
                os.sched_setaffinity(int(thread.name), near)
        logger.info("Bound to the %d of %d cores near GPU %s.", len(near), len(allowed), address)


def cores_near(address: str) -> set[int]:
    """Return the cores on the NUMA node of the PCI device at ``address``; empty if the kernel does not know them."""
    try:
        return parse_cores((PCI_DEVICES / address / "local_cpulist").read_text())
    except OSError:
        return set()


def parse_cores(text: str) -> set[int]:
    """Return the cores of a list such as ``0-3,8,12-15``."""
    ranges = (part.split("-") for part in text.strip().split(",") if part)
    return {core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1)}
