"""One rank of a training: load, check the engine, train, seal, and on rank 0 write the receipt as the last act."""

import importlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
)

from shardmake.attempt import Attempt, AttemptDir, rank_report
from shardmake.caches import leave_collectives_to_gloo
from shardmake.data.dataset import collator, load
from shardmake.data.isolation import check_isolation
from shardmake.plan.plan import Plan, read_plan
from shardmake.receipt import read_json, write_json
from shardmake.train import ledger
from shardmake.train.callbacks import Heartbeat, Metrics, Pace, Stop
from shardmake.train.engine import check_engine, describe_engine, environment_report
from shardmake.train.finite import FiniteGuard
from shardmake.train.load import load_base
from shardmake.train.order import WholeBatches
from shardmake.train.receipt import write_receipt
from shardmake.train.saving import Saver, SealedTrainer
from shardmake.train.trackers import tracker_environment


class ShardedTrainer(SealedTrainer):
    """A Trainer whose checkpoints of a sharded engine hold the weights once.

    Transformers saves them a second time, gathered on rank 0 (ZeRO-1, ZeRO-2) or as a second sharded checkpoint
    (ZeRO-3); here only what a model folder has beside the weights is written along. ``guard`` sees every loss and
    gradient norm.
    """

    guard: FiniteGuard

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
            for part in _descriptions(model):
                part.save_pretrained(folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)


def _descriptions(model: Any) -> list[Any]:
    """The parts of a model that describe it and hold no weights: configs, adapter configs."""
    adapters = getattr(model, "peft_config", {}).values()
    generation = [model.generation_config] if getattr(model, "generation_config", None) else []
    return [model.config, *generation, *adapters]


def train(attempt_folder: Path) -> None:
    """Run this rank of the attempt in ``attempt_folder`` to its end."""
    folder = AttemptDir(attempt_folder)
    attempt = folder.read()
    rank = int(os.environ.get("RANK", "0"))
    heartbeat = Heartbeat(folder, rank)
    heartbeat.beat("load", 0)
    rank_report(folder, rank, environment_report())
    plan = read_plan(folder.plan)
    settings = read_json(folder.training, "shardmake train NAME")
    trainer, stop = _make_trainer(folder, attempt, plan, settings, heartbeat)
    trainer.add_callback(_Gate(folder, rank, settings["expected"], trainer))
    trainer.train(resume_from_checkpoint=attempt.resume_from)
    if rank == 0:
        _write_end(folder, attempt, trainer, stopped=stop.requested)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()  # without it a rank sometimes aborts at exit, after all the work is done


def _make_trainer(
    folder: AttemptDir, attempt: Attempt, plan: Plan, settings: dict[str, Any], heartbeat: Heartbeat
) -> tuple[ShardedTrainer, Stop]:
    rundir = attempt.rundir
    if attempt.accelerator == "cpu":
        leave_collectives_to_gloo()
    # The arguments come before the model: they tell Transformers to load it sharded.
    arguments = _training_arguments(settings, folder, attempt)
    model = _load_model(settings)
    tokens_per_step = plan.choice.global_batch_size * plan.workload.sequence_length

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

    stop = Stop([rundir.stop_file, folder.stop_file])
    guard = FiniteGuard(int(os.environ.get("RANK", "0")))
    checkpoints = settings["checkpoints"]
    retention = ledger.Retention(**checkpoints["retention"])
    saver = Saver(rundir.checkpoints, describe, retention, attempt.checkpoint_bytes)
    trainer = ShardedTrainer(
        model=model,
        args=arguments,
        train_dataset=WholeBatches(load(rundir.data, "train"), plan.choice.global_batch_size),
        eval_dataset=load(rundir.data, "eval"),
        data_collator=collator(rundir.data, plan.workload.attention),
        processing_class=_load_tokenizer(settings),
        optimizer_cls_and_kwargs=_optimizer(settings),
        callbacks=[
            guard,
            Metrics(rundir.metrics, tokens_per_step, attempt.number),
            stop,
            Pace(saver, checkpoints["mtbf_seconds"]),
            heartbeat,
        ],
    )
    trainer.guard = guard
    trainer.saver = saver
    return trainer, stop


class _Gate(TrainerCallback):
    """Placed before the first step: report what came up and refuse to train anything else than the plan."""

    def __init__(self, folder: AttemptDir, rank: int, expected: dict[str, Any], trainer: ShardedTrainer) -> None:
        self.folder, self.rank, self.expected, self.trainer = folder, rank, expected, trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare and, if anything differs, raise on every rank."""
        found = describe_engine(self.trainer)
        rank_report(self.folder, self.rank, environment_report() | found)
        check_engine(found, self.expected)
        check_isolation(self.trainer.model_wrapped, self.trainer.data_collator, self.trainer.args.device)


def _training_arguments(settings: dict[str, Any], folder: AttemptDir, attempt: Attempt) -> TrainingArguments:
    arguments = dict(settings["arguments"])
    if read_json(folder.deepspeed, "shardmake train NAME"):
        arguments["deepspeed"] = str(folder.deepspeed)
    trackers = arguments["report_to"]
    os.environ.update(tracker_environment(attempt.rundir, trackers, offline=attempt.offline, environment=os.environ))
    return TrainingArguments(output_dir=str(attempt.rundir.checkpoints), run_name=attempt.rundir.name, **arguments)


def _optimizer(settings: dict[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """The optimizer that the plan names by its class; None: the one that the training arguments name."""
    named = settings["optimizer"]
    if named is None:
        return None
    module, _, name = named["class"].rpartition(".")
    return getattr(importlib.import_module(module), name), named["arguments"]


def _load_model(settings: dict[str, Any]) -> PreTrainedModel:
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


def _load_tokenizer(settings: dict[str, Any]) -> Any:
    model = settings["model"]
    return AutoTokenizer.from_pretrained(
        model["path"], revision=model["revision"], trust_remote_code=model["trust_remote_code"]
    )


def _write_end(folder: AttemptDir, attempt: Attempt, trainer: ShardedTrainer, *, stopped: bool) -> None:
    """The receipt if the last step is done and sealed; otherwise a note that the stop was asked for."""
    state = trainer.state
    sealed = next(ledger.sealed(attempt.rundir.checkpoints), None)
    step = sealed[0].step if sealed else 0
    if state.global_step < state.max_steps:
        assert stopped, f"training ended at step {state.global_step} of {state.max_steps} without being asked to"
        write_json(folder.stopped, {"step": step, "time": time.time()})
        return
    if sealed is None or step != state.global_step:
        raise RuntimeError(f"The last step {state.global_step} was not saved; the newest checkpoint is of step {step}.")
    write_receipt(attempt.rundir, *sealed)
