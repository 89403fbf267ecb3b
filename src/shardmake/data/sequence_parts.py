"""Batches of a rank that shares its sequences with others: each rank gets a part of every row.

Labels are shifted before the cut, because the label of a part's last token stands in the next part. Position ids are
those of the whole row. Masks are left out: they would belong to the part, and the kernels attend over the whole row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad

from shardmake.data.dataset import IGNORED, Collator, Item


@dataclass(frozen=True)
class PartCollator:
    """Makes the batch of ``whole`` and keeps part ``index`` of ``count`` of each row.

    ``input_ids``, ``labels``, ``shift_labels`` and ``position_ids`` have the shape [batch, tokens of a row / count].
    Boundaries of packed examples (``cu_seq_lens``) stay those of the whole row.
    """

    whole: Collator
    index: int
    count: int

    def __call__(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return this rank's part of the batch of ``items``."""
        return take_part(self.whole(items), self.index, self.count)

    def with_length(self, tokens: int) -> "PartCollator":
        """Return the collator of rows of ``tokens``."""
        return replace(self, whole=replace(self.whole, sequence_length=tokens))


def take_part(batch: dict[str, Any], index: int, count: int) -> dict[str, Any]:
    """Return part ``index`` of ``count`` of each row of a whole batch, whose length is a multiple of ``count``."""
    ids, labels = batch["input_ids"], batch["labels"]
    rows, tokens = ids.shape
    assert tokens % count == 0, f"{tokens} tokens cannot be divided by {count}"
    by_token = {
        "input_ids": ids,
        "labels": labels,
        "shift_labels": pad(labels, (0, 1), value=IGNORED)[:, 1:],
        "position_ids": batch.get("position_ids", torch.arange(tokens).expand(rows, tokens)),
    }
    width = tokens // count
    parts = {name: whole[:, index * width : (index + 1) * width].contiguous() for name, whole in by_token.items()}
    others = {name: value for name, value in batch.items() if name not in by_token and name != "attention_mask"}
    return {**others, **parts}
