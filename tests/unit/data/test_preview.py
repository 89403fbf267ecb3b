"""The preview of training examples."""

import json
from pathlib import Path

import pytest

from shardmake.core.errors import DataError
from shardmake.data import preview
from tests.unit.data.test_encode import MARKED, chat, make_tokenizer
from tests.unit.data.test_stage import make_run, write_rows


@pytest.fixture
def base(tmp_path: Path) -> Path:
    make_tokenizer(MARKED).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_loss_tokens_are_marked_and_a_cut_is_shown(base: Path, tmp_path: Path) -> None:
    rows = [{"messages": chat("u:hi", "a:yes")}, {"messages": chat("u:hi", "a:" + "w" * 9)}, {"messages": []}]
    data = {"train": write_rows(tmp_path / "t.jsonl", rows)}
    first, second = (text.splitlines() for text in preview(make_run(base, data, sequence_length=9), 2))
    assert first[0] == f"{tmp_path / 't.jsonl'}, line 1: 9 tokens, 4 of them learned"
    texts = [text.replace(" ", "") for text in (first[1], second[1])]  # this tokenizer decodes to single characters
    assert texts == ["<user>hi</s><assistant>[[yes</s>]]", "<user>hi</s><assistant>[[wwww]][cut:6tokens]"]


def test_both_answers_of_a_pair_are_shown(base: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a:", "chosen": " b", "rejected": " c"}]
    run = make_run(base, {"train": write_rows(tmp_path / "t.jsonl", rows)}, objective="dpo", packing=False)
    titles, texts = zip(*(text.replace(" ", "").splitlines() for text in preview(run, 1)), strict=True)
    assert texts == ("<s>a:[[b</s>]]", "<s>a:[[c</s>]]")
    assert [title.rpartition(":")[0].rpartition(",")[2] for title in titles] == ["chosen", "rejected"]


def test_a_wrong_example_is_named_by_its_line(base: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": chat("u:a", "a:b")}) + '\n{"messages": 3}\n')
    with pytest.raises(DataError, match="line 2: messages is not a list"):
        list(preview(make_run(base, {"train": str(tmp_path / "t.jsonl")}), 2))
