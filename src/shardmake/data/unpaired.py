"""Completions with labels, mapped from disk, and batches of them for TRL's trainers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import Dataset

from shardmake.run.paths import DATA_RECEIPT
from shardmake.run.receipts import DataReceipt

Completion = dict[str, Any]


class Completions(Dataset[Completion]):
    """The completions of one split of the data in ``folder``, mapped from disk."""

    def __init__(self, folder: Path, split: Literal["train", "eval"]) -> None:
        import datasets

        DataReceipt.read(folder / DATA_RECEIPT)
        self._rows = datasets.load_from_disk(str(folder / split))

    def __len__(self) -> int:
        return len(self._rows)

    def labels(self) -> list[bool]:
        """Return the label of each example."""
        return list(self._rows["label"])

    def __getitem__(self, index: int) -> Completion:
        """Return ``prompt_ids`` and ``completion_ids`` of one example, and ``label``: True for a desirable one.

        Prompt and completion may be longer than a sequence: batches are cut when each prompt has its completion.
        """
        row = self._rows[index]
        ids, start = row["input_ids"], row["loss_mask"].index(True)
        return {
            "prompt_ids": ids[:start],
            "completion_ids": [*ids[start:], *row["cut_ids"]],
            "label": row["label"],
        }


class WithMismatched(Dataset[Completion]):
    """Completions, in which each prompt also has the completion of the example before it in its block.

    The first prompt of a block has that of its last example. The KL divergence is estimated from these mismatched
    completions. A block has ``size`` examples, as many as a micro batch; the last block may have fewer. This is TRL's
    rule (`KTOTrainer._prepare_dataset`).
    """

    def __init__(self, completions: Any, size: int) -> None:
        self.completions, self.size = completions, size

    def __len__(self) -> int:
        return len(self.completions)

    def __getitem__(self, index: int) -> Completion:
        """Return example ``index``, and ``KL_completion_ids``."""
        end = min(index - index % self.size + self.size, len(self))
        other = self.completions[(index if index % self.size else end) - 1]
        return {**self.completions[index], "KL_completion_ids": other["completion_ids"]}


@dataclass(frozen=True)
class UnpairedCollator:
    """Makes TRL's batches of examples with mismatched completions."""

    sequence_length: int
    pad_token_id: int

    @classmethod
    def of(cls, folder: Path) -> "UnpairedCollator":
        """Return the collator for the data in ``folder``."""
        receipt = DataReceipt.read(folder / DATA_RECEIPT)
        return cls(receipt.settings.sequence_length, receipt.pad_token_id)

    def __call__(self, examples: Sequence[Completion]) -> dict[str, Any]:
        """Return ``input_ids``, ``attention_mask`` and ``completion_mask``, each of shape [examples, tokens].

        There are the same three of the mismatched completions, with ``KL_`` before their names, and ``label``, of shape
        [examples]. Sequences are cut to ``sequence_length`` and padded on the right to the longest one.
        """
        from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

        collate = DataCollatorForUnpairedPreference(self.pad_token_id, self.sequence_length)
        batch: dict[str, Any] = collate(list(examples))
        return batch
