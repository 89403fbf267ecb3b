"""Parts that all of TRL's trainers share: data that are tokenized already, and nothing sent or written beside them."""

from collections.abc import Callable
from typing import Any

import datasets
import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

from shardmake.train.load_model import load_tokenizer
from shardmake.train.rank_context import RankContext
from shardmake.train.sharded_trainer import ShardedTrainer
from shardmake.train.training_setup import WholeBatches

Collate = Callable[[Any], dict[str, Any]]


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
    train: Dataset[Any],
    held_out: Dataset[Any],
    collate: Collate,
) -> dict[str, Any]:
    """Return the arguments of a `TrlTrainer` that do not depend on the objective: all but the models."""
    folder = context.attempt.rundir.data
    return {
        "prepared": {"train": WholeBatches(train, context.plan.choice.global_batch_size), "eval": held_out},
        "args": arguments,
        "train_dataset": datasets.load_from_disk(str(folder / "train")),
        "eval_dataset": datasets.load_from_disk(str(folder / "eval")),
        "data_collator": collate,
        "processing_class": load_tokenizer(context.settings),
        "callbacks": callbacks,
    }
