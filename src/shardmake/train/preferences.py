"""Train on preferences with TRL's trainers, with Shardmake's data, checkpoints and checks."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.trainer import dpo_trainer, kto_trainer

from shardmake.config.models import Referenced
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.strategies import FSDP
from shardmake.data.dataset import PreferenceCollator, Preferences, WithMismatched
from shardmake.run.training_settings import FullMethod, TrainingSettings
from shardmake.train.load_model import load_base, load_model, load_tokenizer
from shardmake.train.rank_context import RankContext
from shardmake.train.reference import PrecomputedReference, WithReference
from shardmake.train.sharded_trainer import ShardedTrainer
from shardmake.train.training_setup import WholeBatches, planned_optimizer


class TrlTrainer(ShardedTrainer):
    """The base of a class that also derives from a trainer of TRL.

    TRL takes only data sets of the class `datasets.Dataset`, and tokenizes them; ``prepared`` maps those that it gets
    to the ones to train on. It writes no model card and sends nothing to its makers.
    """

    def __init__(self, prepared: dict[str, Any], model: torch.nn.Module, **kwargs: Any) -> None:
        self._prepared = prepared
        adapters = _adapters_on_four_bits(model)
        super().__init__(model=model, **kwargs)
        for name, weights in adapters.items():
            parameter = self.model.get_parameter(name)
            parameter.data = weights.to(parameter.device)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        return self._prepared[dataset_name]

    def _send_telemetry(self) -> None:
        pass

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing: the report stage writes the card."""


def _adapters_on_four_bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained weights of a model in 4 bits, by name; nothing of any other model.

    TRL rounds them to bf16, in which AdamW without a master copy loses small updates. They keep the planned data type.
    """
    if not getattr(model, "is_loaded_in_4bit", False):
        return {}
    return {name: weight.data for name, weight in model.named_parameters() if weight.requires_grad}


def trl_options(
    context: RankContext,
    arguments: TrainingArguments,
    callbacks: list[TrainerCallback],
    splits: Mapping[str, Dataset[Any]],
    collate: PreferenceCollator,
) -> dict[str, Any]:
    """Return the arguments of a `TrlTrainer` that do not depend on the objective: all but the models."""
    folder = context.attempt.rundir.data
    return {
        "prepared": {**splits, "train": WholeBatches(splits["train"], context.plan.choice.global_batch_size)},
        "args": arguments,
        "train_dataset": datasets.load_from_disk(str(folder / "train")),
        "eval_dataset": datasets.load_from_disk(str(folder / "eval")),
        "data_collator": collate,
        "processing_class": load_tokenizer(context.settings),
        "callbacks": callbacks,
    }


_TRL_COPY = "ref"
"""Name of the adapter that TRL adds to a model with adapters, a copy of them at the start, as the reference."""


class ReferencedTrainer(TrlTrainer):
    """The base of TRL's trainers that compare the trained model with a reference."""

    library: ClassVar[Any]
    """TRL's module of the trainer."""
    log_probs: ClassVar[tuple[str, ...]]
    """TRL's names of the log-probabilities that an example has under the reference."""

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        return dataset  # `PrecomputedReference` computes them, when the model is sharded

    def _prepare_input(self, data: Any) -> Any:
        """Move ``data`` to the device; Trainer would also round log-probabilities to DeepSpeed's 16 bits."""
        return data.to(self.args.device) if isinstance(data, torch.Tensor) else super()._prepare_input(data)


class DpoTrainer(ReferencedTrainer, DPOTrainer):
    """TRL's trainer of direct preference optimization."""

    library = dpo_trainer
    log_probs = ("ref_chosen_logps", "ref_rejected_logps")


class KtoTrainer(ReferencedTrainer, KTOTrainer):
    """TRL's trainer of Kahneman-Tversky optimization."""

    library = kto_trainer
    log_probs = ("ref_logps", "ref_KL_logps")


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


def _with_reference(
    kind: type[ReferencedTrainer],
    context: RankContext,
    arguments: TrainingArguments,
    callbacks: list[TrainerCallback],
    splits: Mapping[str, Dataset[Any]],
    collate: PreferenceCollator,
) -> TrlTrainer:
    """Return the trainer. The reference is the base model.

    It is the model without its adapters, a second model, or the trained one before its first step.
    """
    settings, attempt = context.settings, context.attempt
    objective, is_full = settings.objective_settings, isinstance(settings.method, FullMethod)
    assert isinstance(objective, Referenced)
    kind.library.prepare_fsdp = shard_reference
    kind.library.hash_module = lambda module: ""  # the name of TRL's own file of log-probabilities, from all weights
    if objective.is_precomputed:
        splits = filled = {name: WithReference(examples, kind.log_probs) for name, examples in splits.items()}
    model = load_model(settings)
    trainer = kind(
        **trl_options(context, arguments, callbacks, splits, collate),
        model=model,
        ref_model=_reference(settings, model.config, precomputed=objective.is_precomputed) if is_full else None,
    )
    if objective.is_precomputed:
        trainer.ref_model = None
        file = attempt.rundir.reference_log_probs(attempt.settings_digest)
        trainer.after_check.append(PrecomputedReference(trainer, filled, file, callbacks))
    if not is_full:  # without the copy, TRL turns the adapters off for the reference
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


TRAINERS: Final[dict[str, type[TrlTrainer]]] = {"dpo": DpoTrainer, "kto": KtoTrainer, "reward": RewardModelTrainer}


def make_trl_trainer(
    context: RankContext, arguments: TrainingArguments, callbacks: list[TrainerCallback]
) -> TrlTrainer:
    """Return the trainer of the run's objective, with the planned optimizer."""
    folder, objective = context.attempt.rundir.data, context.settings.objective
    splits: dict[str, Dataset[Any]] = {"train": Preferences(folder, "train"), "eval": Preferences(folder, "eval")}
    if OBJECTIVES[objective].compares_batch:
        size = context.plan.choice.micro_batch_size
        splits = {name: WithMismatched(examples, size) for name, examples in splits.items()}
    kind, collate = TRAINERS[objective], PreferenceCollator.of(folder, objective)
    if issubclass(kind, ReferencedTrainer):
        trainer = _with_reference(kind, context, arguments, callbacks, splits, collate)
    else:
        options = trl_options(context, arguments, callbacks, splits, collate)
        trainer = kind(**options, model=load_model(context.settings))
    trainer.optimizer_cls_and_kwargs = planned_optimizer(context.settings)
    return trainer
