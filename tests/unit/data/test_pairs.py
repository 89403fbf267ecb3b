"""Pairs of answers: their forms, the split into prompt and answers, cuts, and broken rows."""

from pathlib import Path
from typing import Any

import pytest
from trl.data_utils import extract_prompt

from shardmake.config.models import Data
from shardmake.core.errors import DataError, ModelError
from shardmake.data.dataset import PreferenceCollator
from shardmake.data.encode import Encoder, split_pair
from shardmake.data.examples import load_tokenizer
from shardmake.data.layout import Layout, recognize, split_prompt
from shardmake.data.packing import fit_pair
from tests.unit.data.test_encode import PLAIN, chat, chat_template, make_tokenizer
from tests.unit.plans import make_run

PLACE = "f.jsonl, line 3"


def layout_of(example: dict[str, Any]) -> Layout:
    return recognize(Data(train="x"), "dpo", example, PLACE)


def encoded(example: dict[str, Any]) -> list[str]:
    tokenizer = make_tokenizer(PLAIN)
    prompt, answers = split_pair(*Encoder(chat_template(tokenizer), layout_of(example), True)(example, PLACE))
    return ["".join(tokenizer.convert_ids_to_tokens(ids)) for ids in (prompt, *answers)]


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ({"prompt": "a:", "chosen": " b", "rejected": " c"}, ["<s>a:", " b</s>", " c</s>"]),
        ({"chosen": "a: b", "rejected": "a: c"}, ["<s>a:", " b</s>", " c</s>"]),
        (
            {"prompt": chat("u:a"), "chosen": chat("a:b"), "rejected": chat("a:c")},
            ["<user>a</s><assistant>", "b</s>", "c</s>"],
        ),
        ({"chosen": chat("u:a", "a:b"), "rejected": chat("u:a", "a:c")}, ["<user>a</s><assistant>", "b</s>", "c</s>"]),
    ],
    ids=["text", "text with its prompt", "chat", "chat with its prompt"],
)
def test_a_pair_is_encoded(example: dict[str, Any], expected: list[str]) -> None:
    assert encoded(example) == expected


@pytest.mark.parametrize(("chosen", "rejected"), [("q: a", "q: b"), ("abc", "abd"), ("abc", "ab"), ("same", "same")])
def test_the_prompt_is_that_of_trl(chosen: str, rejected: str) -> None:
    example: dict[str, Any] = {"chosen": chosen, "rejected": rejected}
    assert split_prompt(chosen, rejected) == extract_prompt(example)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"chosen": "a", "rejected": "b"}, "no common beginning"),
        ({"prompt": "p", "chosen": "a", "rejected": chat("a:b")}, "rejected is not text"),
        ({"prompt": "p", "chosen": "a"}, "has no rejected"),
        ({"prompt": "p", "chosen": 3, "rejected": 4}, "prompt is text, chosen is not text"),
    ],
)
def test_a_broken_row_is_named(example: dict[str, Any], message: str) -> None:
    layout = layout_of({"prompt": "p", "chosen": "a", "rejected": "b"})
    with pytest.raises(DataError, match=f"line 3: .*{message}"):
        layout.standardize(example, PLACE)


@pytest.mark.parametrize(
    ("length", "answers", "cuts", "expected"),
    [
        (4, [[3, 4], [3, 5]], True, ([[3, 4], [3, 5]], "whole")),
        (3, [[3, 4], [5]], True, ([[3], [5]], "truncated")),
        (3, [[3, 4], [3, 5]], True, ([], "dropped_loss_truncated")),
        (2, [[3], [4]], True, ([], "dropped_loss_truncated")),
        (9, [[3], [3]], True, ([], "dropped_without_loss")),
        (3, [[3, 4], [5]], False, ([], "dropped_too_long")),
        (4, [[3, 4], [5]], False, ([[3, 4], [5]], "whole")),
    ],
)
def test_both_answers_are_cut_or_dropped(length: int, answers: list[list[int]], cuts: bool, expected: object) -> None:
    assert fit_pair([1, 2], answers, length, cuts=cuts) == expected


def test_batches_of_a_reward_model_are_whole_conversations() -> None:
    rows = [
        {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]},
        {"prompt_ids": [6], "chosen_ids": [7], "rejected_ids": [8]},
    ]
    batch = PreferenceCollator("reward", 8, pad_token_id=9)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9], [6, 7, 9, 9], [1, 2, 4, 5], [6, 8, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]


def test_a_reward_model_needs_a_padding_token(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(PLAIN)
    tokenizer.save_pretrained(tmp_path)
    run = make_run(model=str(tmp_path), objective="reward", packing=False)
    assert load_tokenizer(run).eos_token is not None
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="neither a padding nor an end-of-sequence token"):
        load_tokenizer(run)
    assert load_tokenizer(run.model_copy(update={"objective": "dpo"})).pad_token is None
