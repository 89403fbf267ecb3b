"""Train on preferences with TRL's trainers, with Shardmake's data, checkpoints and checks."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.trainer import dpo_trainer, kto_trainer, reward_trainer

from shardmake.config.models import Referenced
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.strategies import FSDP
from shardmake.core.atomic import write_bytes
from shardmake.core.errors import CheckpointError
from shardmake.core.private_names import private
from shardmake.core.units import plural
from shardmake.data.dataset import Answered, Preferences
from shardmake.run.receipts import DataReceipt
from shardmake.run.training_settings import FullMethod, TrainingSettings
from shardmake.train.callbacks.heartbeat import HeartbeatCallback
from shardmake.train.callbacks.metrics import MetricsCallback
from shardmake.train.collectives import get_rank, get_world_size, run_on_first_rank
from shardmake.train.load_model import load_base, load_model, load_tokenizer
from shardmake.train.rank_context import RankContext
from shardmake.train.sharded_trainer import ShardedTrainer, WholeBatches, planned_optimizer


class WithMismatched(Dataset[Answered]):
    """Completions, in which each prompt also has the completion of the example before it in its block.

    The first prompt of a block has that of its last example. The KL divergence is estimated from these mismatched
    completions. A block has ``size`` examples, as many as a micro batch; the last block may have fewer. This is TRL's
    rule (`KTOTrainer._prepare_dataset`).
    """

    def __init__(self, completions: Any, size: int) -> None:
        self.completions, self.size = completions, size

    def __len__(self) -> int:
        return len(self.completions)

    def __getitem__(self, index: int) -> Answered:
        """Return example ``index``, and ``KL_completion_ids``."""
        end = min(index - index % self.size + self.size, len(self))
        other = self.completions[(index if index % self.size else end) - 1]
        return {**self.completions[index], "KL_completion_ids": other["completion_ids"]}


@dataclass(frozen=True)
class PreferenceCollator:
    """Makes TRL's batches for an objective, padded on the right to the longest sequence.

    They have ``input_ids`` and ``attention_mask`` of shape [sequences, tokens], and all but those of a reward model are
    cut to ``sequence_length`` and have ``completion_mask``. Pairs: all chosen answers, then all rejected ones. With
    labels: the same three of the mismatched completions, with ``KL_`` before their names, and ``label`` [examples].
    """

    objective: str
    sequence_length: int
    pad_token_id: int

    def __call__(self, examples: Sequence[Answered]) -> dict[str, Any]:
        """Return the batch of ``examples``."""
        if self.objective == "reward":
            names = ("chosen_ids", "rejected_ids")
            whole = [{name: [*pair["prompt_ids"], *pair[name]] for name in names} for pair in examples]
            return dict(reward_trainer.DataCollatorForPreference(self.pad_token_id)(whole))
        pairs, labelled = dpo_trainer.DataCollatorForPreference, kto_trainer.DataCollatorForUnpairedPreference
        return dict(
            (labelled if self.objective == "kto" else pairs)(self.pad_token_id, self.sequence_length)(list(examples))
        )


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
        return data.to(self.args.device) if isinstance(data, torch.Tensor) else private(super()).prepare_input(data)


class DpoTrainer(ReferencedTrainer, DPOTrainer):
    """TRL's trainer of direct preference optimization."""

    library = dpo_trainer
    log_probs = ("ref_chosen_logps", "ref_rejected_logps")


class KtoTrainer(ReferencedTrainer, KTOTrainer):
    """TRL's trainer of Kahneman-Tversky optimization."""

    library = kto_trainer
    log_probs = ("ref_logps", "ref_KL_logps")


class RewardModelTrainer(TrlTrainer, RewardTrainer):
    """TRL's trainer of a model with one output, the reward of a conversation."""


TRAINERS: Final[dict[str, type[TrlTrainer]]] = {"dpo": DpoTrainer, "kto": KtoTrainer, "reward": RewardModelTrainer}


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


def make_trl_trainer(
    context: RankContext, arguments: TrainingArguments, callbacks: list[TrainerCallback]
) -> TrlTrainer:
    """Return the trainer of the run's objective, with the planned optimizer.

    The reference is the model before the first step: without its new adapters, as a second model, or run in advance.
    """
    settings, attempt, choice = context.settings, context.attempt, context.plan.choice
    folder, kind, objective = attempt.rundir.data, TRAINERS[settings.objective], settings.objective_settings
    examples: dict[str, Any] = {"train": Preferences(folder, "train"), "eval": Preferences(folder, "eval")}
    if OBJECTIVES[settings.objective].compares_batch:
        examples = {split: WithMismatched(found, choice.micro_batch_size) for split, found in examples.items()}
    receipt, models = DataReceipt.read(attempt.rundir.data_receipt), dict[str, Any]()
    precomputed = has_copy = False
    if issubclass(kind, ReferencedTrainer):
        assert isinstance(objective, Referenced)
        kind.library.prepare_fsdp = shard_reference
        kind.library.hash_module = lambda module: ""  # the name of TRL's file of log-probabilities, from all weights
        if precomputed := objective.is_precomputed:
            examples = {split: WithReference(found, kind.log_probs) for split, found in examples.items()}
    model = load_model(settings, arguments)
    if isinstance(objective, Referenced):
        has_copy = not isinstance(settings.method, FullMethod)
        models["ref_model"] = None if has_copy else _reference(settings, arguments, model.config, objective)
    trainer = kind(
        prepared={**examples, "train": WholeBatches(examples["train"], choice.global_batch_size)},
        args=arguments,
        train_dataset=datasets.load_from_disk(str(folder / "train")),
        eval_dataset=datasets.load_from_disk(str(folder / "eval")),
        data_collator=PreferenceCollator(settings.objective, receipt.settings.sequence_length, receipt.pad_token_id),
        processing_class=load_tokenizer(settings),
        callbacks=callbacks,
        model=model,
        **models,
    )
    if precomputed:
        trainer.ref_model = None
        if getattr(settings.method, "adapter", None):  # the reference has the adapter with which the training starts
            kind.library.use_adapter = lambda *_, **__: contextlib.nullcontext()
        file = attempt.rundir.reference_log_probs(attempt.settings_digest)
        trainer.after_check.append(PrecomputedReference(trainer, examples, file, callbacks))
    if has_copy:  # without the copy, TRL turns the adapters off for the reference
        trainer.model.delete_adapter(_TRL_COPY)
    trainer.optimizer_cls_and_kwargs = planned_optimizer(settings)
    return trainer


def _reference(
    settings: TrainingSettings, arguments: TrainingArguments, config: Any, objective: Referenced
) -> torch.nn.Module | None:
    if not objective.is_precomputed:
        return load_base(settings, arguments).requires_grad_(False)
    return _NoReference(config) if settings.expected.engine == FSDP else None


Splits = Mapping[str, "WithReference"]
PHASE = "reference"
"""Phase of the heartbeats while the log-probabilities are computed."""


class WithReference(Dataset[dict[str, Any]]):
    """Examples with log-probabilities of answers under the reference model, once ``log_probs`` has them.

    ``names`` are those that TRL gives to the log-probabilities of an example's answers.
    """

    def __init__(self, examples: Any, names: tuple[str, ...]) -> None:
        self.examples, self.names = examples, names
        self.log_probs = torch.empty(0, len(names))
        """Nats, summed over the tokens of an answer: shape [examples, answers], fp32."""

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return example ``index`` with its log-probabilities."""
        return {**self.examples[index], **dict(zip(self.names, self.log_probs[index].tolist(), strict=True))}


class PrecomputedReference(TrainerCallback):
    """Fill in the log-probabilities of ``splits`` when training begins: from ``file``, or else from the model.

    Before its first step the trained model is the reference, so no second model is needed. The file is written before
    any checkpoint, so a training that resumes reads it. Clocks among ``callbacks`` start again afterwards.
    """

    def __init__(self, trainer: Any, splits: Splits, file: Path, callbacks: Sequence[TrainerCallback]) -> None:
        self.trainer, self.splits, self.file = trainer, splits, file
        self.clocks = [one for one in callbacks if isinstance(one, HeartbeatCallback | MetricsCallback)]

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise `CheckpointError` if the file is needed, because steps were done already, and cannot be used."""
        found = run_on_first_rank(lambda: read_log_probs(self.file, self.splits, state.global_step))
        if found is None:
            found = {name: self._compute(split) for name, split in self.splits.items()}
            if get_rank() == 0:
                write_bytes(self.file, save(found))
        for name, split in self.splits.items():
            split.log_probs = found[name]
        for clock in self.clocks:
            clock.on_train_begin(args, state, control)

    def _compute(self, split: WithReference) -> torch.Tensor:
        """Return `WithReference.log_probs` under the model before its first step, on every rank.

        Each pass takes as many examples as one of training. The last pass is filled up from the start, so that all
        ranks run the same number of passes.
        """
        trainer = self.trainer
        model, batch = trainer.model_wrapped, trainer.args.per_device_train_batch_size
        beats = [clock.beat for clock in self.clocks if isinstance(clock, HeartbeatCallback)]
        model.eval()
        found = []
        for start in range(get_rank() * batch, get_rank() * batch + len(split), batch * get_world_size()):
            for beat in beats:
                beat(PHASE, 0)
            examples = [split.examples[(start + offset) % len(split)] for offset in range(batch)]
            inputs = private(trainer).prepare_inputs(trainer.data_collator(examples))
            answers = torch.stack(trainer.compute_ref_log_probs(model, inputs), dim=1)
            found.append(trainer.accelerator.gather(answers).float().cpu())
        return torch.cat(found)[: len(split)].contiguous()


def read_log_probs(file: Path, splits: Splits, step: int) -> dict[str, torch.Tensor] | None:
    """Return the log-probabilities by split; None if the training is at its start and no file is complete.

    Raises `CheckpointError` if ``step`` optimizer steps were done: the model is not the reference any more.
    """
    try:
        found: dict[str, torch.Tensor] = load(file.read_bytes())
        complete = {name: (len(split), len(split.names)) for name, split in splits.items()}
        if {name: tuple(values.shape) for name, values in found.items()} == complete:
            return found
        problem = "It belongs to other data."
    except (OSError, SafetensorError) as error:
        problem = f"{error}."
    if step == 0:
        return None
    raise CheckpointError(
        f"The log-probabilities of the reference model cannot be read: {file}. {problem} They were computed before the "
        f"first step, and the checkpoint to resume from has {plural(step, 'step')}. Restore the file, or remove the "
        "run's checkpoints to start again."
    )
