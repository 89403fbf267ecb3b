"""The `TrainingArguments` and the optimizer of an attempt."""

import importlib
from typing import Any

import torch
from transformers import TrainingArguments

from shardmake.core.atomic import read_json
from shardmake.core.environment import leave_collectives_to_gloo
from shardmake.run.training_settings import TrainingSettings
from shardmake.train.rank_context import RankContext
from shardmake.train.trackers import PROJECT, prepare_trackers


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
    return TrainingArguments(
        output_dir=str(attempt.rundir.checkpoints), run_name=attempt.rundir.name, project=PROJECT, **arguments
    )


def planned_optimizer(settings: TrainingSettings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Return the planned optimizer's class and arguments; None if the training arguments name the optimizer."""
    optimizer = settings.optimizer
    if optimizer is None:
        return None
    module, _, name = optimizer.class_name.rpartition(".")
    return getattr(importlib.import_module(module), name), optimizer.arguments
