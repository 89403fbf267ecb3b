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
        """Return ``prompt_ids`` and ``completion_ids`` of one example, and ``label``: True for a desirable one."""
        row = self._rows[index]
        ids, start = row["input_ids"], row["loss_mask"].index(True)
        return {"prompt_ids": ids[:start], "completion_ids": ids[start:], "label": row["label"]}


@dataclass(frozen=True)
class UnpairedCollator:
    """Makes TRL's batches, in which each prompt also has the completion of the example before it.

    The first prompt has that of the last example. The KL divergence is estimated from these mismatched completions. TRL
    pairs them in the same way when it prepares the data, in blocks as long as a batch.
    """

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

        others = [examples[-1], *examples[:-1]]
        matched = [
            {**example, "KL_completion_ids": other["completion_ids"]}
            for example, other in zip(examples, others, strict=True)
        ]
        batch: dict[str, Any] = DataCollatorForUnpairedPreference(self.pad_token_id, self.sequence_length)(matched)
        return batch
