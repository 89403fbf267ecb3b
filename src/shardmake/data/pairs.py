"""Pairs of answers, mapped from disk, and batches of them for TRL's trainers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import Dataset

from shardmake.run.paths import DATA_RECEIPT
from shardmake.run.receipts import DataReceipt

Pair = dict[str, list[int]]


class Pairs(Dataset[Pair]):
    """The pairs of one split of the data in ``folder``, mapped from disk."""

    def __init__(self, folder: Path, split: Literal["train", "eval"]) -> None:
        import datasets

        DataReceipt.read(folder / DATA_RECEIPT)
        self._rows = datasets.load_from_disk(str(folder / split))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Pair:
        """Return the token ids of one pair under TRL's names: ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``."""
        row = self._rows[index]
        ids, start = row["input_ids"], row["loss_mask"].index(True)
        return {"prompt_ids": ids[:start], "chosen_ids": ids[start:], "rejected_ids": row["rejected_ids"]}


@dataclass(frozen=True)
class RewardCollator:
    """Makes TRL's batches of prompts with answers: all chosen ones, then all rejected ones, padded on the right."""

    pad_token_id: int

    @classmethod
    def of(cls, folder: Path) -> "RewardCollator":
        """Return the collator for the data in ``folder``."""
        return cls(DataReceipt.read(folder / DATA_RECEIPT).pad_token_id)

    def __call__(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Return ``input_ids`` and ``attention_mask``, each of shape [2 x pairs, tokens]."""
        from trl.trainer.reward_trainer import DataCollatorForPreference

        answers = ("chosen_ids", "rejected_ids")
        whole = [{answer: [*pair["prompt_ids"], *pair[answer]] for answer in answers} for pair in pairs]
        batch: dict[str, Any] = DataCollatorForPreference(self.pad_token_id)(whole)
        return batch


@dataclass(frozen=True)
class PairCollator:
    """Makes TRL's batches: all chosen answers, then all rejected ones, padded on the right to the longest of both."""

    sequence_length: int
    pad_token_id: int

    @classmethod
    def of(cls, folder: Path) -> "PairCollator":
        """Return the collator for the data in ``folder``."""
        receipt = DataReceipt.read(folder / DATA_RECEIPT)
        return cls(receipt.settings.sequence_length, receipt.pad_token_id)

    def __call__(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Return ``input_ids``, ``attention_mask`` and ``completion_mask``, each of shape [2 x pairs, tokens]."""
        from trl.trainer.dpo_trainer import DataCollatorForPreference

        batch: dict[str, Any] = DataCollatorForPreference(self.pad_token_id, self.sequence_length)(list(pairs))
        return batch
