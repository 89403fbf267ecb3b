import pytest

from shardmake.core.errors import ConfigError
from shardmake.core.units import format_bytes, format_duration, format_number, numbered, parse_size, plural


def test_a_count_has_its_noun_in_the_right_number() -> None:
    assert [plural(count, "attempt").split(" ") for count in (0, 1, 2, 1234)] == [
        ["0", "attempts"], ["1", "attempt"], ["2", "attempts"], ["1,234", "attempts"],
    ]  # fmt: skip
    assert (numbered("Rank", [3]), numbered("Rank", [1, 3])) == ("Rank 3", "Ranks 1, 3")


def test_durations() -> None:
    shown = [format_duration(seconds) for seconds in (0, 59.6, 250, 11100)]
    assert shown == ["0 s", "1 min 00 s", "4 min 10 s", "3 h 05 min"]


def test_sizes_have_a_unit_of_which_they_are_at_least_one() -> None:
    sizes = [format_bytes(size) for size in (3 << 30, 5 << 20, 300_000, 12, 0)]
    assert sizes == ["3.0 GiB", "5 MiB", "293 KiB", "12 bytes", "0 bytes"]


def test_a_number_has_three_digits_and_no_exponent() -> None:
    shown = [format_number(value) for value in (0.1584, 12.84, 99.96, 243.4, 1163.0)]
    assert shown == ["0.158", "12.8", "100", "243", "1,163"]


def test_a_size_has_a_number_and_a_unit() -> None:
    assert [*map(parse_size, ("5GB", "500MB", "2GiB", "1.5kb"))] == [5 * 10**9, 5 * 10**8, 2 << 30, 1500]
    for text in ("", "5 apples", "-1GB", "0GB", "GB"):
        with pytest.raises(ConfigError, match="Cannot parse the size"):
            parse_size(text)
