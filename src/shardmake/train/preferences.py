"""Train on preferences with TRL's trainers, with Shardmake's data, checkpoints and checks."""

from collections.abc import Callable
from typing import Final

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from transformers import TrainerCallback, TrainingArguments
from trl import DPOTrainer
from trl.trainer import dpo_trainer

from shardmake.data.pairs import PairCollator, Pairs
from shardmake.run.training_settings import FullMethod
from shardmake.train.load_model import load_base, load_model
from shardmake.train.rank_context import RankContext
from shardmake.train.training_setup import planned_optimizer
from shardmake.train.trl_trainer import TrlTrainer, trl_options

_TRL_COPY = "ref"
"""Name of the adapter that TRL adds to a model with adapters, a copy of them at the start, as the reference."""


class DpoTrainer(TrlTrainer, DPOTrainer):
    """TRL's trainer of direct preference optimization."""


def shard_reference(model: torch.nn.Module, accelerator: Accelerator) -> torch.nn.Module:
    """Return ``model``, sharded by FSDP2 layer by layer and with the weights of rank 0, as accelerate shards a policy.

    TRL's own function gathers the whole reference at once, and expects that every rank has loaded it.
    """
    return fsdp2_prepare_model(accelerator, model).eval()


def make_dpo_trainer(
    context: RankContext, arguments: TrainingArguments, callbacks: list[TrainerCallback]
) -> TrlTrainer:
    """Return the trainer; the reference is the base model: the model without its adapters, or a second one."""
    settings, folder = context.settings, context.attempt.rundir.data
    is_full = isinstance(settings.method, FullMethod)
    dpo_trainer.prepare_fsdp = shard_reference
    train, held_out = Pairs(folder, "train"), Pairs(folder, "eval")
    trainer = DpoTrainer(
        **trl_options(context, arguments, callbacks, train, held_out, PairCollator.of(folder)),
        model=load_model(settings),
        ref_model=load_base(settings).requires_grad_(False) if is_full else None,
    )
    if not is_full:  # without the copy, TRL turns the adapters off for the reference
        trainer.model.delete_adapter(_TRL_COPY)
    return trainer


MakeTrainer = Callable[[RankContext, TrainingArguments, list[TrainerCallback]], TrlTrainer]
TRAINERS: Final[dict[str, MakeTrainer]] = {"dpo": make_dpo_trainer}


def make_trl_trainer(
    context: RankContext, arguments: TrainingArguments, callbacks: list[TrainerCallback]
) -> TrlTrainer:
    """Return the trainer of the run's objective, with the planned optimizer."""
    trainer = TRAINERS[context.settings.objective](context, arguments, callbacks)
    trainer.optimizer_cls_and_kwargs = planned_optimizer(context.settings)
    return trainer
