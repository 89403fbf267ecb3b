"""Train on preferences with TRL's trainers, with Shardmake's data, checkpoints and checks."""

from collections.abc import Callable
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.trainer import dpo_trainer, kto_trainer

from shardmake.config.strategies import FSDP
from shardmake.data.pairs import PairCollator, Pairs, RewardCollator
from shardmake.data.unpaired import Completions, UnpairedCollator
from shardmake.run.training_settings import FullMethod, TrainingSettings
from shardmake.train.load_model import load_base, load_model
from shardmake.train.rank_context import RankContext
from shardmake.train.reference import PrecomputedReference, WithReference
from shardmake.train.training_setup import planned_optimizer
from shardmake.train.trl_trainer import TrlTrainer, trl_options

_LOG_PROBS = ("ref_chosen_logps", "ref_rejected_logps")
_TRL_COPY = "ref"
"""Name of the adapter that TRL adds to a model with adapters, a copy of them at the start, as the reference."""


class DpoTrainer(TrlTrainer, DPOTrainer):
    """TRL's trainer of direct preference optimization."""

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        return dataset  # `PrecomputedReference` computes them, when the model is sharded

    def _prepare_input(self, data: Any) -> Any:
        """Move ``data`` to the device; Trainer would also round log-probabilities to DeepSpeed's 16 bits."""
        return data.to(self.args.device) if isinstance(data, torch.Tensor) else super()._prepare_input(data)


class KtoTrainer(TrlTrainer, KTOTrainer):
    """TRL's trainer of Kahneman-Tversky optimization."""


class _NoReference(torch.nn.Module):
    """Stands for the second model that TRL would load under FSDP, until TRL's trainer is made."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self) -> None:
        """Do nothing; TRL extends this method."""


def shard_reference(model: torch.nn.Module, accelerator: Accelerator) -> torch.nn.Module:
    """Return ``model``, sharded by FSDP2 layer by layer and with the weights of rank 0, as accelerate shards a policy.

    TRL's own function gathers the whole reference at once, and expects that every rank has loaded it.
    """
    if isinstance(model, _NoReference):
        return model
    return fsdp2_prepare_model(accelerator, model).eval()


def make_dpo_trainer(
    context: RankContext, arguments: TrainingArguments, callbacks: list[TrainerCallback]
) -> TrlTrainer:
    """Return the trainer. The reference is the base model.

    It is the model without its adapters, a second model, or the trained one before its first step.
    """
    settings, rundir, attempt = context.settings, context.attempt.rundir, context.attempt
    is_full = isinstance(settings.method, FullMethod)
    assert settings.dpo is not None
    precomputed = settings.dpo.reference == "precomputed"
    dpo_trainer.prepare_fsdp = shard_reference
    dpo_trainer.hash_module = lambda module: ""  # the name of TRL's own file of log-probabilities, from all weights
    train, held_out = Pairs(rundir.data, "train"), Pairs(rundir.data, "eval")
    splits = {"train": WithReference(train, _LOG_PROBS), "eval": WithReference(held_out, _LOG_PROBS)}
    data: tuple[Dataset[Any], Dataset[Any]] = (splits["train"], splits["eval"]) if precomputed else (train, held_out)
    model = load_model(settings)
    trainer = DpoTrainer(
        **trl_options(context, arguments, callbacks, *data, PairCollator.of(rundir.data)),
        model=model,
        ref_model=_reference(settings, model.config, precomputed=precomputed) if is_full else None,
    )
    if precomputed:
        trainer.ref_model = None
        file = rundir.reference_log_probs(attempt.settings_digest)
        trainer.after_check.append(PrecomputedReference(trainer, splits, file, callbacks))
    if not is_full:  # without the copy, TRL turns the adapters off for the reference
        trainer.model.delete_adapter(_TRL_COPY)
    return trainer


def make_kto_trainer(
    context: RankContext, arguments: TrainingArguments, callbacks: list[TrainerCallback]
) -> TrlTrainer:
    """Return the trainer. The reference is the base model: the model without its adapters, or a second model."""
    settings, folder = context.settings, context.attempt.rundir.data
    is_full = isinstance(settings.method, FullMethod)
    kto_trainer.prepare_fsdp = shard_reference
    train, held_out = Completions(folder, "train"), Completions(folder, "eval")
    trainer = KtoTrainer(
        **trl_options(context, arguments, callbacks, train, held_out, UnpairedCollator.of(folder)),
        model=load_model(settings),
        ref_model=_second_model(settings) if is_full else None,
    )
    if not is_full:
        trainer.model.delete_adapter(_TRL_COPY)
    return trainer


def _reference(settings: TrainingSettings, config: Any, *, precomputed: bool) -> torch.nn.Module | None:
    """Return the reference model of a full fine-tuning, for TRL's trainer."""
    if not precomputed:
        return _second_model(settings)
    return _NoReference(config) if settings.expected.engine == FSDP else None


def _second_model(settings: TrainingSettings) -> torch.nn.Module:
    return load_base(settings).requires_grad_(False)


class RewardModelTrainer(TrlTrainer, RewardTrainer):
    """TRL's trainer of reward models."""


def make_reward_trainer(
    context: RankContext, arguments: TrainingArguments, callbacks: list[TrainerCallback]
) -> TrlTrainer:
    """Return the trainer of a model with one output, the reward of a conversation."""
    folder = context.attempt.rundir.data
    train, held_out = Pairs(folder, "train"), Pairs(folder, "eval")
    options = trl_options(context, arguments, callbacks, train, held_out, RewardCollator.of(folder))
    return RewardModelTrainer(**options, model=load_model(context.settings))


MakeTrainer = Callable[[RankContext, TrainingArguments, list[TrainerCallback]], TrlTrainer]
TRAINERS: Final[dict[str, MakeTrainer]] = {
    "dpo": make_dpo_trainer,
    "kto": make_kto_trainer,
    "reward": make_reward_trainer,
}


def make_trl_trainer(
    context: RankContext, arguments: TrainingArguments, callbacks: list[TrainerCallback]
) -> TrlTrainer:
    """Return the trainer of the run's objective, with the planned optimizer."""
    trainer = TRAINERS[context.settings.objective](context, arguments, callbacks)
    trainer.optimizer_cls_and_kwargs = planned_optimizer(context.settings)
    return trainer
