"""Tokenizers of published models, which `make test-tokenizers` installs, with the templates of their families.

The tokens and masks of every conversation are compared with the independent reference, and what is refused with the
page of the docs, whose cells come from small tokenizers.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from shardmake.data.encode import _by_bytes, _by_offsets, _widths
from shardmake.data.placeholders import Rendered
from tests.unit.data.reference import TEMPLATES, stops_of
from tests.unit.data.test_templates import CONVERSATIONS, cells_of, outcome, read_page

pytestmark = pytest.mark.tokenizers
FOLDER = Path(__file__).parents[3] / "build/tokenizers"
FAMILIES = {
    "qwen3": ("qwen2_5", "qwen3"), "llama3_1": ("llama3",),
    "gemma3": ("gemma", "gemma3", "gemma_training", "gemma3_training"), "deepseek_v3": ("deepseek",),
    "gptoss": ("gptoss",),
}  # fmt: skip
PARTS = ["a", " ", "  ", "\n\n", " word", "It is", "日本", "é", "e\u0301", "\u0958", "🙂", "\t", "1234567", "'s", "▁", "\r\n"]  # fmt: skip


def load(name: str) -> Any:
    return AutoTokenizer.from_pretrained(FOLDER / name)


def templates_of(name: str) -> list[str]:
    exact = name == "gemma3"  # Gemma 4's templates have other special tokens
    return [one for one in sorted(TEMPLATES) if (one in FAMILIES[name] if exact else one.startswith(FAMILIES[name]))]


@pytest.mark.parametrize(("name", "template"), [(name, one) for name in FAMILIES for one in templates_of(name)])
def test_templates_of_trl_give_what_they_give_with_small_tokenizers(name: str, template: str) -> None:
    tokenizer = load(name)
    tokenizer.chat_template = TEMPLATES[template]
    assert cells_of(template, tokenizer) == read_page()[template]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gptoss"])
def test_the_models_own_template_gives_what_the_model_must_say_or_a_reason(name: str) -> None:
    prefix, tokenizer = FAMILIES[name][-1], load(name)
    found = {title: outcome(prefix, row, tokenizer) for title, row in CONVERSATIONS.items()}
    assert not [one for one in found.items() if one[1].startswith("wrong")]
    assert {found[title] for title in ("one turn", "two turns", "last turn of the user")} <= {"right", "apart"}
    assert all(token in tokenizer.get_vocab() for token in stops_of(prefix)[:1])


@pytest.mark.parametrize("name", FAMILIES)
def test_offsets_in_bytes_are_those_of_the_tokenizer(name: str) -> None:
    tokenizer, draw = load(name), random.Random(0)
    assert _widths(tokenizer) is not None
    special = [str(token) for token in tokenizer.added_tokens_decoder.values()][:6]
    for _ in range(1000):
        text = "".join(draw.choices([*PARTS, *special], k=draw.randint(1, 30)))
        start, end = sorted(draw.choices(range(len(text) + 1), k=2))
        rendered = [Rendered(text, ((start, end),))]
        one, other = (next(read(tokenizer, rendered)) for read in (_by_bytes, _by_offsets))
        assert [part.tolist() for part in one] == [part.tolist() for part in other], (text, start, end)
