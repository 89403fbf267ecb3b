"""Train on preferences with TRL's trainer, with Shardmake's data, checkpoints and checks."""

from typing import Any

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from transformers import TrainerCallback, TrainingArguments
from trl import DPOTrainer
from trl.trainer import dpo_trainer

from shardmake.data.pairs import PairCollator, Pairs
from shardmake.run.training_settings import FullMethod
from shardmake.train.load_model import load_base, load_model, load_tokenizer
from shardmake.train.rank_context import RankContext
from shardmake.train.sharded_trainer import ShardedTrainer
from shardmake.train.training_setup import WholeBatches, planned_optimizer

_TRL_COPY = "ref"
"""Name of the adapter that TRL adds to a model with adapters, a copy of them at the start, as the reference."""


class PreferenceTrainer(ShardedTrainer, DPOTrainer):
    """TRL's trainer of direct preference optimization on data that are tokenized already.

    TRL takes only data sets of the class `datasets.Dataset`, and tokenizes them; ``prepared`` maps those that it gets
    to the ones to train on. It writes no model card and sends nothing to its makers.
    """

    def __init__(self, prepared: dict[str, Any], **kwargs: Any) -> None:
        self._prepared = prepared
        super().__init__(**kwargs)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        return self._prepared[dataset_name]

    def _send_telemetry(self) -> None:
        pass

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing: the report stage writes the card."""


def shard_reference(model: torch.nn.Module, accelerator: Accelerator) -> torch.nn.Module:
    """Return ``model``, sharded by FSDP2 layer by layer and with the weights of rank 0, as accelerate shards a policy.

    TRL's own function gathers the whole reference at once, and expects that every rank has loaded it.
    """
    return fsdp2_prepare_model(accelerator, model).eval()


def make_preference_trainer(
    context: RankContext, arguments: TrainingArguments, callbacks: list[TrainerCallback]
) -> PreferenceTrainer:
    """Return the trainer; the reference is the base model: the model without its adapters, or a second one."""
    settings, plan, folder = context.settings, context.plan, context.attempt.rundir.data
    is_full = isinstance(settings.method, FullMethod)
    dpo_trainer.prepare_fsdp = shard_reference
    trainer = PreferenceTrainer(
        prepared={
            "train": WholeBatches(Pairs(folder, "train"), plan.choice.global_batch_size),
            "eval": Pairs(folder, "eval"),
        },
        model=load_model(settings),
        ref_model=load_base(settings).requires_grad_(False) if is_full else None,
        args=arguments,
        train_dataset=datasets.load_from_disk(str(folder / "train")),
        eval_dataset=datasets.load_from_disk(str(folder / "eval")),
        data_collator=PairCollator.of(folder),
        processing_class=load_tokenizer(settings),
        callbacks=callbacks,
    )
    trainer.optimizer_cls_and_kwargs = planned_optimizer(settings)
    if not is_full:  # without the copy, TRL turns the adapters off for the reference
        trainer.model.delete_adapter(_TRL_COPY)
    return trainer
