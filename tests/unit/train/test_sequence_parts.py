"""The parts of a batch's rows are together the whole rows."""

import pytest
import torch

from shardmake.data.dataset import IGNORED, Collator, Item
from shardmake.train.sequence_parallel import PartCollator


def item(tokens: int, first: int) -> Item:
    ids = torch.arange(tokens) + 3
    positions = torch.cat([torch.arange(first), torch.arange(tokens - first)])
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_parts_are_together_the_whole_batch(packing: bool, flat: bool) -> None:
    """Labels are those of the next token, also at the end of a part; a padded row without packing counts on."""
    whole, items = Collator(16, 0, packing, flat=packing and flat), [item(13, 5), item(16, 7)]
    parts = [PartCollator(whole, index, 4)(items) for index in range(4)]
    batch = whole(items)
    rows, tokens = batch["input_ids"].shape
    joined = {
        name: torch.cat([part[name] for part in parts], dim=1)
        for name in ("input_ids", "labels", "shift_labels", "position_ids")
    }
    assert torch.equal(joined["input_ids"], batch["input_ids"]) and torch.equal(joined["labels"], batch["labels"])
    assert torch.equal(joined["shift_labels"][:, :-1], batch["labels"][:, 1:])
    assert (joined["shift_labels"][:, -1] == IGNORED).all()
    counted = batch["position_ids"] if packing else torch.arange(tokens).expand(rows, tokens)
    assert torch.equal(joined["position_ids"], counted)
    for part in parts:
        assert "attention_mask" not in part
        if packing and flat:
            assert torch.equal(part["cu_seq_lens_q"], batch["cu_seq_lens_q"]), "of the whole row"
            assert part["max_length_q"] == batch["max_length_q"]


def test_the_length_of_the_rows_can_change() -> None:
    short = PartCollator(Collator(64, 0, packing=False, flat=False), 1, 2).with_length(16)
    assert short([item(10, 5)])["input_ids"].tolist() == [[11, 12, 0, 0, 0, 0, 0, 0]]
