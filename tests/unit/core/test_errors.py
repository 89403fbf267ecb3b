"""Suggestions for misspelt words."""

import pytest

from shardmake.core.errors import ShardmakeError, nearest


@pytest.mark.parametrize(("word", "suggestion"), [
    ("zer3", " Did you mean 'zero3'?"), ("zero3 ", " Did you mean 'zero3'?"), ("fdsp", " Did you mean 'fsdp'?"),
    ("deepspeed", ""), ("", ""),
])  # fmt: skip
def test_nearest(word: str, suggestion: str) -> None:
    assert nearest(word, iter(("ddp", "zero3", "fsdp"))) == suggestion


def test_the_text_of_an_error_is_its_message() -> None:
    assert str(ShardmakeError("what is wrong and what to do")) == "what is wrong and what to do"
