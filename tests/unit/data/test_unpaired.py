"""Completions with labels: their forms, broken rows, and the mismatched completions of a batch."""

from typing import Any

import pytest

from shardmake.config.models import Data
from shardmake.core.errors import DataError
from shardmake.data.dataset import PreferenceCollator, WithMismatched
from shardmake.data.encode import Encoder
from shardmake.data.layout import Layout, recognize
from tests.unit.data.test_encode import PLAIN, chat, chat_template, make_tokenizer

PLACE = "f.jsonl, line 3"


def layout_of(example: dict[str, Any]) -> Layout:
    return recognize(Data(train="x"), "kto", example, PLACE)


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ({"prompt": "a:", "completion": " b", "label": True}, ["<s>a:", " b</s>"]),
        ({"prompt": chat("u:a"), "completion": chat("a:b"), "label": False}, ["<user>a</s><assistant>", "b</s>"]),
    ],
    ids=["text", "chat"],
)
def test_a_completion_is_encoded(example: dict[str, Any], expected: list[str]) -> None:
    tokenizer = make_tokenizer(PLAIN)
    ((ids, mask),) = Encoder(chat_template(tokenizer), layout_of(example), True)(example, PLACE)
    start = mask.index(True)
    assert ["".join(tokenizer.convert_ids_to_tokens(part)) for part in (ids[:start], ids[start:])] == expected
    assert all(mask[start:])


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"prompt": "p", "completion": "a"}, "has no label"),
        ({"prompt": "p", "completion": "a", "label": "yes"}, "label is 'yes'. Write true or false"),
        ({"prompt": "p", "completion": "a", "label": 1}, "label is 1. Write true or false"),
        ({"prompt": "p", "completion": "a", "label": None}, "has no label"),
        ({"prompt": "p", "completion": chat("a:b"), "label": True}, "completion is list, not text"),
    ],
)
def test_a_broken_row_is_named(example: dict[str, Any], message: str) -> None:
    layout = layout_of({"prompt": "p", "completion": "a", "label": True})
    with pytest.raises(DataError, match=f"line 3: .*{message}"):
        layout.standardize(example, PLACE)


def test_each_prompt_also_has_the_completion_before_it() -> None:
    examples = [{"prompt_ids": [n], "completion_ids": [10 * n, 10 * n + 1], "label": n == 1} for n in (1, 2, 3)]
    mismatched = WithMismatched(examples, 3)
    batch = PreferenceCollator("kto", sequence_length=8, pad_token_id=0)([mismatched[n] for n in range(3)])
    assert batch["input_ids"].tolist() == [[1, 10, 11], [2, 20, 21], [3, 30, 31]]
    assert batch["KL_input_ids"].tolist() == [[1, 30, 31], [2, 10, 11], [3, 20, 21]]
    assert batch["KL_completion_mask"].tolist() == [[0, 1, 1]] * 3
    assert batch["label"].tolist() == [True, False, False]


@pytest.mark.parametrize("length", [1, 6, 7, 8])
def test_completions_are_mismatched_as_by_trl(length: int) -> None:
    """TRL does it in blocks of a micro batch, of which the last may have fewer examples."""
    import datasets
    from trl import KTOConfig, KTOTrainer

    tokenizer = make_tokenizer(PLAIN)
    trainer: Any = KTOTrainer.__new__(KTOTrainer)
    trainer.calculate_KL, trainer._tokenizer = True, tokenizer
    rows = [{"prompt": f"{n}:", "completion": f"{n}", "label": True} for n in range(length)]
    arguments = KTOConfig(output_dir="unused", per_device_train_batch_size=3, use_cpu=True, bf16=False)
    theirs = trainer._prepare_dataset(datasets.Dataset.from_list(rows), tokenizer, arguments, "eval")
    ours = WithMismatched([{"completion_ids": ids} for ids in theirs["completion_ids"]], 3)
    assert [ours[n]["KL_completion_ids"] for n in range(length)] == list(theirs["KL_completion_ids"])
