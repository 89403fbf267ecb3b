from collections.abc import Callable
from typing import Any

import pytest

from shardmake.core.errors import ConfigError, nearest
from shardmake.core.units import format_bytes, format_duration, format_number, numbered, parse_size, plural


@pytest.mark.parametrize(("shows", "texts"), [
    (lambda count: plural(count, "attempt"), {0: "0 attempts", 1: "1 attempt", 2: "2 attempts", 1234: "1,234 attempts"}),
    (lambda ranks: numbered("Rank", ranks), {(3,): "Rank 3", (1, 3): "Ranks 1, 3"}),
    (format_duration, {-90: "0 s", 0: "0 s", 59.6: "1 min 00 s", 250: "4 min 10 s", 11100: "3 h 05 min"}),
    (format_bytes, {3 << 30: "3.0 GiB", 5 << 20: "5 MiB", 300_000: "293 KiB", 12: "12 bytes", 0: "0 bytes"}),
    (format_number, {0.1584: "0.158", 12.84: "12.8", 99.96: "100", 243.4: "243", 1163.0: "1,163"}),
])  # fmt: skip
def test_values_as_people_read_them(shows: Callable[[Any], str], texts: dict[Any, str]) -> None:
    """A count has its noun in the right number, a size a unit of which it is at least one, a number three digits."""
    assert {value: shows(value) for value in texts} == texts


def test_a_size_has_a_number_and_a_unit() -> None:
    assert [*map(parse_size, ("5GB", "500MB", "2GiB", "1.5kb"))] == [5 * 10**9, 5 * 10**8, 2 << 30, 1500]
    for text in ("", "5 apples", "-1GB", "0GB", "GB"):
        with pytest.raises(ConfigError, match="Cannot parse the size"):
            parse_size(text)


@pytest.mark.parametrize(("word", "suggestion"), [
    ("zer3", " Did you mean 'zero3'?"), ("zero3 ", " Did you mean 'zero3'?"), ("fdsp", " Did you mean 'fsdp'?"),
    ("deepspeed", ""), ("", ""),
])  # fmt: skip
def test_a_misspelt_word_has_a_suggestion(word: str, suggestion: str) -> None:
    assert nearest(word, iter(("ddp", "zero3", "fsdp"))) == suggestion
