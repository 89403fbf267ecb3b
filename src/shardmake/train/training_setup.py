"""The parts of a training around its loop: arguments, data order, callbacks, checks and the completion."""

import contextlib
import importlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainerState, TrainingArguments

from shardmake.checkpoint import store
from shardmake.checkpoint.store import Retention
from shardmake.checkpoint.training_receipt import write_training_receipt
from shardmake.config.objectives import OBJECTIVES
from shardmake.core.atomic import read_json
from shardmake.core.environment import leave_collectives_to_gloo
from shardmake.run.attempt import RequestedStop, rank_report, room_timeout
from shardmake.run.training_settings import TrainingSettings
from shardmake.train.async_saver import ScratchFolder, share_of_node
from shardmake.train.callbacks.heartbeat import HeartbeatCallback
from shardmake.train.callbacks.metrics import MetricsCallback
from shardmake.train.callbacks.non_finite import NonFiniteCheck
from shardmake.train.callbacks.save_scheduler import SaveScheduler, StopOnRequest
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
from shardmake.train.rank_context import RankContext
from shardmake.train.trackers import PROJECT, prepare_trackers

# Bind a rank that computes on the host to the cores near its GPU, whose memory the GPU reaches fastest.
#
# Accelerate's ``--enable_cpu_affinity`` numbers GPUs without regard to ``CUDA_VISIBLE_DEVICES`` and ends the rank if
# the job may not use those cores. torch's own binding is an option of torchrun and needs numactl.

logger = logging.getLogger(__name__)

PCI_DEVICES = Path("/sys/bus/pci/devices")


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


def start_rank(attempt_folder: Path) -> tuple[RankContext, HeartbeatCallback]:
    """Return the settings of this rank and its heartbeat, after the first heartbeat and report."""
    context = RankContext.load(attempt_folder)
    heartbeat = HeartbeatCallback(context.folder, context.rank)
    heartbeat.beat("load", 0)
    rank_report(context.folder, context.rank, environment_report())
    return context, heartbeat


def training_arguments(context: RankContext) -> TrainingArguments:
    """Return the rendered arguments with the attempt's paths.

    Create them before the model: transformers reads them to decide whether to load the model sharded.
    """
    attempt = context.attempt
    if attempt.accelerator == "cpu":
        leave_collectives_to_gloo()
    arguments = dict(context.settings.arguments)
    if read_json(context.folder.deepspeed, "shardmake train NAME"):
        arguments["deepspeed"] = str(context.folder.deepspeed)
    prepare_trackers(attempt, arguments["report_to"])
    kind = trl_arguments(context, trl) if (trl := OBJECTIVES[context.settings.objective].trl) else TrainingArguments
    made = kind(output_dir=str(attempt.rundir.checkpoints), run_name=attempt.rundir.name, project=PROJECT, **arguments)
    if made.fsdp_plugin_args is not None:
        made.fsdp_plugin_args["mixed_precision_policy"] = fsdp_policy(context.settings.expected)
    if made.device.type == "cuda" and context.plan.choice.spec.offload_optimizer:
        bind_to_gpu(made.device)
    return made


def trl_arguments(context: RankContext, name: str) -> Callable[..., TrainingArguments]:
    """Return TRL's class of training arguments that begins with ``name``, with the settings of the objective."""
    import trl

    settings = context.settings
    section = settings.objective_settings
    length, checkpointing = context.plan.workload.sequence_length, settings.arguments["activation_checkpointing"]
    # TRL turns checkpointing on under its old name, which it also reads.
    planned = {"max_length": length, "gradient_checkpointing": checkpointing}
    return partial(getattr(trl, f"{name}Config"), **planned, **(section.trl_arguments() if section else {}))


def planned_optimizer(settings: TrainingSettings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Return the planned optimizer's class and arguments; None if the training arguments name the optimizer."""
    optimizer = settings.optimizer
    if optimizer is None:
        return None
    module, _, name = optimizer.class_name.rpartition(".")
    return getattr(importlib.import_module(module), name), optimizer.arguments


@dataclass(frozen=True)
class TrainingCallbacks:
    """The callbacks in the order in which they are called, two of them by name, and the checkpoint saver."""

    callbacks: list[TrainerCallback]
    stop: StopOnRequest
    non_finite: NonFiniteCheck
    saver: Saver


def make_callbacks(context: RankContext, heartbeat: HeartbeatCallback) -> TrainingCallbacks:
    """Return the callbacks of one attempt on this rank."""
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
    retention = Retention(**dict(checkpoints.retention))
    scratch = _scratch_folder(context) if checkpoints.asynchronous else None
    seconds = room_timeout(attempt.hang_seconds)
    saver = Saver(rundir.checkpoints, describe, retention, attempt.checkpoint_bytes, scratch, seconds)
    scheduler = SaveScheduler(saver, checkpoints.mtbf_seconds)
    return TrainingCallbacks([non_finite, metrics, stop, scheduler, heartbeat], stop, non_finite, saver)


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


class WholeBatches(Dataset[Any]):
    """A data set that repeats samples from its start until an epoch has a whole number of global batches.

    It keeps the samples of every optimizer step the same for any number of ranks. Trainer draws one order per epoch
    from the seed and distributes micro batches to the ranks in turn. So step k of an epoch takes samples k G to
    (k + 1) G of that order, however a global batch of G is split. Only the end of an epoch would depend on the split:
    Trainer fills the last samples up to full micro batches on all ranks, not to a global batch.
    """

    def __init__(self, data: Any, global_batch_size: int) -> None:
        self.data = data
        self.length = -(-len(data) // global_batch_size) * global_batch_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index`` of the repeated data."""
        return self.data[index % len(self.data)]
