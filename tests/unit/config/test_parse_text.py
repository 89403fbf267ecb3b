"""YAML and JSON texts that the libraries' readers accept in part, or fail at."""

import json

import pytest
import yaml

from shardmake.config.parse_text import parse_json, parse_yaml

WRONG = {
    "run: 1\nday: 2026-01-31\n": (2, "'2026-01-31' is a date. Write it in quotes"),
    "day: 2026-13-45\n": (1, "month must be in 1..12"),
    "rate: 0x_\n": (1, "invalid literal for int() with base 16: ''"),
    "steps: 1" + 5000 * "0" + "\n": (1, "Exceeds the limit (4300 digits) for integer string conversion"),
    "a: 1\nruns: &all\n  more: *all\n": (2, "the section contains itself"),
    "runs: &all [*all]\n": (1, "the section contains itself"),
    "\n\nlogo: !!binary aGVsbG8=\n": (3, "values with the tag 'binary' have no meaning here"),
    "names: !!set {a, b}\n": (1, "values with the tag 'set' have no meaning here"),
    'name: "\\ud800"\n': (1, "the text has half of a pair of Unicode surrogates"),
    "a: 1\nb: 2\na: 3\n": (3, "the key 'a' occurs twice"),
}


@pytest.mark.parametrize("text", WRONG)
def test_each_unreadable_value_is_an_error_with_its_line(text: str) -> None:
    with pytest.raises(yaml.MarkedYAMLError) as error:
        parse_yaml(text)
    assert error.value.problem_mark is not None
    line, problem = WRONG[text]
    assert error.value.problem_mark.line + 1 == line
    assert str(error.value.problem).startswith(problem)


def test_aliases_quoted_dates_and_whole_pairs_are_read() -> None:
    text = "base: &base {model: m, data: &data {train: t}}\nrun: {<<: *base, data: *data, model: n, seed: 1}\n"
    assert parse_yaml(text)["run"] == {"model": "n", "data": {"train": "t"}, "seed": 1}
    assert parse_yaml("day: '2026-01-31'\nname: \"\U0001f600\"\n") == {"day": "2026-01-31", "name": "\U0001f600"}
    assert parse_json('["\\ud83d\\ude00", "\\\\ud800"]') == ["\U0001f600", "\\ud800"]


def test_texts_of_endless_depth_are_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="nested too deeply"):
        parse_yaml("[" * 3000)
    with pytest.raises(json.JSONDecodeError, match="nested too deeply"):
        parse_json("[" * 200_000)


HALVES = '"\\ud800"', '["\\udc00"]', '{"a\\ud800": 1}', '["\\ud83d\\ude00", "\\ud83d!"]'
WRONG_JSON = {5000 * "9": "the number has too many digits"} | dict.fromkeys(
    HALVES, "the text has half of a pair of Unicode surrogates"
)


def test_a_number_of_too_many_digits_and_half_of_a_surrogate_pair_in_json_are_errors_of_their_line() -> None:
    for value, message in WRONG_JSON.items():
        with pytest.raises(json.JSONDecodeError) as error:
            parse_json('{\n"name": ' + value + "}")
        assert (error.value.lineno, error.value.msg) == (2, message)


def test_a_byte_order_mark_is_an_error_of_json_alone() -> None:
    assert parse_yaml("\ufeffseed: 1\n") == {"seed": 1}
    with pytest.raises(json.JSONDecodeError, match=r"byte order mark \(BOM\).* Save the file as UTF-8 without BOM"):
        parse_json('\ufeff{"seed": 1}')
