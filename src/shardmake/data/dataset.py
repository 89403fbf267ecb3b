"""Data of the ranks: packed sequences mapped from disk, and batches of them.

The kernel determines how attention stays within an example. SDPA and eager get position ids that restart at every
example and no attention mask. transformers then builds a block-diagonal mask, but only without a key-value cache, so
batches have ``use_cache=False``. The FlashAttention kernels, varlen and flash, get batches of one long row with the
boundaries of examples in ``cu_seq_lens``. Models treat restarting position ids differently, and no attribute states
how, so `check_isolation` runs the model.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.functional import pad
from torch.utils.data import Dataset

from shardmake.config.attention import FLASH_KERNELS, Attention
from shardmake.core.errors import ModelError
from shardmake.run.paths import DATA_RECEIPT
from shardmake.run.receipts import DataReceipt

IGNORED = -100
Item = dict[str, torch.Tensor]


class _Split(Dataset[Any]):
    """One split of the data that `shardmake.data.stage.prepare` wrote to ``folder``, mapped from disk.

    The library datasets would map the same files, but its import takes half a second on every rank.
    """

    def __init__(self, folder: Path, split: Literal["train", "eval"]) -> None:
        import pyarrow  # 40 MiB that a plan, which tries a `Collator`, does not need

        DataReceipt.read(folder / DATA_RECEIPT)
        files = [file["filename"] for file in json.loads((folder / split / "state.json").read_text())["_data_files"]]
        maps = [pyarrow.memory_map(str(folder / split / file)) for file in files]
        self._batches = [batch for file in maps for batch in pyarrow.ipc.open_stream(file)]
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _row(self, index: int) -> dict[str, Any]:
        """Return the Arrow scalar of each column of row ``index``."""
        index = range(len(self))[index]
        number = bisect_right(self._ends, index)
        batch = self._batches[number]
        return {name: batch[name][index - self._ends[number]] for name in batch.schema.names}

    def _column(self, name: str) -> list[Any]:
        return [value for batch in self._batches for value in batch[name].to_pylist()]


class Sequences(_Split):
    """The sequences of one split; each has one example, or several with packing."""

    def lengths(self) -> list[int]:
        """Return the tokens of each sequence."""
        return [sum(parts) for parts in self._column("seq_lengths")]

    def __getitem__(self, index: int) -> Item:
        """Return ``input_ids``, ``labels`` and ``position_ids`` of one sequence, int64, each of shape [tokens].

        Labels are -100 for tokens without loss; position ids restart at 0 with each example.
        """
        row, names = self._row(index), ("input_ids", "loss_mask", "seq_lengths")
        tokens, learned, lengths = (row[name].values.to_numpy(zero_copy_only=False) for name in names)
        ids = torch.from_numpy(tokens.astype("int64"))
        positions = torch.cat([torch.arange(int(length)) for length in lengths])
        return {"input_ids": ids, "labels": ids.where(torch.from_numpy(learned), IGNORED), "position_ids": positions}


@dataclass(frozen=True)
class Collator:
    """Makes a batch of sequences, each padded on the right to ``sequence_length`` tokens.

    Unpacked: ``input_ids``, ``labels``, ``attention_mask`` of shape [batch, sequence_length].
    Packed: ``input_ids``, ``labels``, ``position_ids`` of that shape; padding is a separate example.
    Packed and ``flat``: the same in one row [1, batch x sequence_length], with ``cu_seq_lens_q``, ``cu_seq_lens_k``
    ([examples + 1], int32, tokens) and ``max_length_q``, ``max_length_k`` (tokens) as FlashAttention expects them.
    """

    sequence_length: int
    pad_token_id: int
    packing: bool
    flat: bool

    def __call__(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return the batch of ``items``."""
        ids, labels = self._pad(items, "input_ids", self.pad_token_id), self._pad(items, "labels", IGNORED)
        batch = {"input_ids": ids, "labels": labels}
        if not self.packing:
            real = [{"real": torch.ones_like(item["input_ids"])} for item in items]
            return {**batch, "attention_mask": self._pad(real, "real", 0)}
        rows = [(item["position_ids"], self.sequence_length - len(item["input_ids"])) for item in items]
        batch["position_ids"] = torch.stack([torch.cat([found, torch.arange(gap)]) for found, gap in rows])
        return {**(_flatten(batch) if self.flat else batch), "use_cache": False}

    def _pad(self, items: Sequence[Item], key: str, value: int) -> torch.Tensor:
        length = self.sequence_length
        return torch.stack([pad(item[key], (0, length - len(item[key])), value=value) for item in items])


def _flatten(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    row: dict[str, Any] = {key: value.reshape(1, -1) for key, value in batch.items()}
    starts = (row["position_ids"][0] == 0).nonzero().flatten()
    bounds = torch.cat([starts, torch.tensor([row["position_ids"].shape[1]])]).to(torch.int32)
    longest = int(bounds.diff().max())
    return {**row, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def collator(folder: Path, attention: Attention) -> Collator:
    """Return the collator for the data in ``folder`` and the attention kernel that the model runs with."""
    receipt = DataReceipt.read(folder / DATA_RECEIPT)
    length, packing = receipt.settings.sequence_length, receipt.settings.packing
    return Collator(length, receipt.pad_token_id, packing, flat=packing and attention in FLASH_KERNELS)


_LENGTH, _BOUNDARY = 16, 7
_TOLERANCE, _ROUNDING = 1e-3, 4
"""The latter in units of the data type's precision: experts round otherwise with other numbers of tokens."""


def check_isolation(
    model: torch.nn.Module, collator: Collator, device: torch.device, dtype: torch.dtype = torch.float32
) -> None:
    """Raise `ModelError` if an example changes the logits of the next one in its sequence, computed in ``dtype``.

    All ranks of a sharded model must take part in two forward passes. A compiled model runs eagerly here: the compiler
    would take a second shape as a reason for dynamic shapes in the training's graph.
    """
    if not collator.packing:
        return
    was_training = model.training
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        one, other = (_logits_of_second(model, collator, first, device) for first in (1, 2))
    model.train(was_training)
    tolerance = max(_TOLERANCE, _ROUNDING * torch.finfo(dtype).eps)
    if (one - other).abs().max() > tolerance * one.abs().max():
        raise ModelError(
            "Packing is not possible: this model mixes packed examples with this attention kernel. "
            "Set packing: false, or try another `attention`."
        )


@torch.no_grad()
def _logits_of_second(model: torch.nn.Module, collator: Collator, first: int, device: torch.device) -> torch.Tensor:
    """Return the logits of the second example in a sequence whose first example repeats the token ``first``."""
    ids = torch.tensor([first] * _BOUNDARY + list(range(3, 3 + _LENGTH - _BOUNDARY)))
    positions = torch.cat([torch.arange(_BOUNDARY), torch.arange(_LENGTH - _BOUNDARY)])
    item = {"input_ids": ids, "labels": ids, "position_ids": positions}
    batch = replace(collator, sequence_length=_LENGTH)([item, item])
    inputs = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    del inputs["labels"]
    logits = model(**inputs).logits.float()
    return logits.reshape(2, _LENGTH, -1)[:, _BOUNDARY:]


Answered = dict[str, Any]
"""A prompt and its answers as token ids, under TRL's names."""


class Preferences(_Split):
    """The pairs, or the completions with labels, of one split."""

    def labels(self) -> list[bool]:
        """Return the label of each completion."""
        return self._column("label")

    def __getitem__(self, index: int) -> Answered:
        """Return ``prompt_ids``, and ``chosen_ids`` and ``rejected_ids``, or ``completion_ids`` and ``label``.

        Prompt and completion may be longer than a sequence: batches are cut when each prompt has its completion.
        """
        row = {name: value.as_py() for name, value in self._row(index).items()}
        start = row["loss_mask"].index(True)
        prompt, answer = row["input_ids"][:start], row["input_ids"][start:]
        if "label" in row:
            return {"prompt_ids": prompt, "completion_ids": [*answer, *row["cut_ids"]], "label": row["label"]}
        return {"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": row["rejected_ids"]}
