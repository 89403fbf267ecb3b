"""Log-probabilities of the reference model that are computed once, before the first step, and kept in the run's folder.

Before its first step the trained model is the reference model, so its log-probabilities need no second model. They are
written before any checkpoint, so a training that resumes reads them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState

from shardmake.core.atomic import write_bytes
from shardmake.core.errors import CheckpointError
from shardmake.core.private_names import private
from shardmake.core.units import plural
from shardmake.train.callbacks.heartbeat import HeartbeatCallback
from shardmake.train.callbacks.metrics import MetricsCallback
from shardmake.train.collectives import get_rank, get_world_size, run_on_first_rank

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

    Those of ``callbacks`` that measure time start again afterwards.
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
