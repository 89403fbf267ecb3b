"""What a training needs before its first step and after its last, whichever loop runs it."""

import importlib
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, TrainerCallback, TrainerState, TrainingArguments, set_seed

from shardmake.checkpoint import store
from shardmake.checkpoint.retention import Retention
from shardmake.checkpoint.training_receipt import write_training_receipt
from shardmake.core.atomic import read_json, write_json
from shardmake.core.environment import leave_collectives_to_gloo
from shardmake.data.dataset import Collator
from shardmake.data.isolation import check_isolation
from shardmake.run.attempt import Attempt, AttemptDir, rank_report
from shardmake.run.plan import Plan
from shardmake.train.async_saver import ScratchFolder, share_of_node
from shardmake.train.callbacks import HeartbeatCallback, MetricsCallback, SaveScheduler, StopOnRequest
from shardmake.train.checkpoint_saver import Saver
from shardmake.train.engine_check import check_engine, describe_engine, environment_report
from shardmake.train.load_model import load_base
from shardmake.train.non_finite import NonFiniteCheck
from shardmake.train.trackers import PROJECT, prepare_trackers


def training_arguments(settings: dict[str, Any], folder: AttemptDir, attempt: Attempt) -> TrainingArguments:
    """The rendered arguments with the attempt's paths. They come before the model: they tell how it is loaded."""
    if attempt.accelerator == "cpu":
        leave_collectives_to_gloo()
    arguments = dict(settings["arguments"])
    if read_json(folder.deepspeed, "shardmake train NAME"):
        arguments["deepspeed"] = str(folder.deepspeed)
    prepare_trackers(attempt, arguments["report_to"])
    return TrainingArguments(
        output_dir=str(attempt.rundir.checkpoints), run_name=attempt.rundir.name, project=PROJECT, **arguments
    )


def named_optimizer(settings: dict[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """The optimizer that the plan names by its class; None: the one that the training arguments name."""
    named = settings["optimizer"]
    if named is None:
        return None
    module, _, name = named["class"].rpartition(".")
    return getattr(importlib.import_module(module), name), named["arguments"]


def load_model(settings: dict[str, Any]) -> PreTrainedModel:
    """What is trained: the base model, with adapters where the method is LoRA; the same on every rank."""
    set_seed(settings["arguments"]["seed"])
    method = settings["method"]
    loaded = load_base(settings)
    loaded.config.use_cache = False
    if method["kind"] == "full":
        return loaded
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if method["kind"] == "qlora":
        loaded = prepare_model_for_kbit_training(loaded, use_gradient_checkpointing=False)
    adapters = LoraConfig(
        r=method["rank"],
        lora_alpha=method["alpha"],
        lora_dropout=method["dropout"],
        target_modules=method["targets"],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(loaded, adapters)


def load_tokenizer(settings: dict[str, Any]) -> Any:
    """The base model's tokenizer, which is saved along."""
    model = settings["model"]
    return AutoTokenizer.from_pretrained(
        model["path"], revision=model["revision"], trust_remote_code=model["trust_remote_code"]
    )


def descriptions(model: Any) -> list[Any]:
    """The parts of a model that describe it and hold no weights: configs, adapter configs."""
    adapters = getattr(model, "peft_config", {}).values()
    generation = [model.generation_config] if getattr(model, "generation_config", None) else []
    return [model.config, *generation, *adapters]


@dataclass(frozen=True)
class TrainingCallbacks:
    """What watches the steps, in the order in which it is asked, two of them by name; and what saves."""

    callbacks: list[TrainerCallback]
    stop: StopOnRequest
    guard: NonFiniteCheck
    saver: Saver


def make_callbacks(
    folder: AttemptDir, attempt: Attempt, plan: Plan, settings: dict[str, Any], heartbeat: HeartbeatCallback
) -> TrainingCallbacks:
    """The callbacks of one attempt on this rank."""
    rundir, tokens_per_step = attempt.rundir, plan.choice.global_batch_size * plan.workload.sequence_length

    def describe(step: int) -> dict[str, Any]:
        return {
            "tokens": step * tokens_per_step,
            "samples": step * plan.choice.global_batch_size,
            "data_seed": settings["arguments"]["data_seed"],
            "world_size": attempt.world_size,
            "strategy": plan.choice.strategy,
            "attempt": attempt.number,
            "recipe": attempt.recipe,
        }

    guard, stop = NonFiniteCheck(heartbeat.rank), StopOnRequest([rundir.stop_file, folder.stop_file])
    metrics = MetricsCallback(rundir.metrics, tokens_per_step, attempt.number)
    checkpoints = settings["checkpoints"]
    retention = Retention(**checkpoints["retention"])
    scratch = _scratch(folder, attempt, plan, heartbeat.rank) if checkpoints.get("asynchronous") else None
    saver = Saver(rundir.checkpoints, describe, retention, attempt.checkpoint_bytes, scratch)
    return TrainingCallbacks(
        [guard, metrics, stop, SaveScheduler(saver, checkpoints["mtbf_seconds"]), heartbeat], stop, guard, saver
    )


def _scratch(folder: AttemptDir, attempt: Attempt, plan: Plan, rank: int) -> ScratchFolder:
    """That of this rank's node; nodes may lie on one machine."""
    node = rank // attempt.processes_per_node
    share = share_of_node(plan.choice, node)
    return ScratchFolder(attempt.saves / f"node-{node}", folder.root, node, attempt.nodes, share)


def check_ready(
    folder: AttemptDir, rank: int, expected: dict[str, Any], model: Any, precision: str, collator: Collator, device: Any
) -> None:
    """Before the first step: report what came up on this rank, and refuse to train anything else than the plan.

    ``model`` is wrapped by its engine already; ``precision`` is Accelerate's word for the compute data type.
    """
    found = describe_engine(model, precision)
    rank_report(folder, rank, environment_report() | found)
    check_engine(found, expected)
    check_isolation(model, collator, device)


def write_end(folder: AttemptDir, attempt: Attempt, state: TrainerState, *, stopped: bool) -> None:
    """The receipt if the last step is done and sealed; otherwise a note that the stop was asked for."""
    sealed = next(store.committed(attempt.rundir.checkpoints), None)
    step = sealed[0].step if sealed else 0
    if state.global_step < state.max_steps:
        assert stopped, f"training ended at step {state.global_step} of {state.max_steps} without being asked to"
        write_json(folder.stopped, {"step": step, "time": time.time()})
        return
    if sealed is None or step != state.global_step:
        raise RuntimeError(f"The last step {state.global_step} was not saved; the newest checkpoint is of step {step}.")
    write_training_receipt(attempt.rundir, *sealed)
