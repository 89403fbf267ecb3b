"""Read YAML and JSON texts. Whatever is wrong in one is an error of its line, also what the libraries fail at."""

import contextlib
import datetime
import json
import re
from collections.abc import Hashable
from typing import Any, Final

import yaml

_MAX_DIGITS: Final = 4300
"""Digits of the longest number that Python converts."""

_LOW: Final = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF_PAIR: Final = re.compile(rf"\\u[dD][89abAB][0-9a-fA-F]{{2}}(?!{_LOW})|(?<!\\u[dD][89abAB]..){_LOW}")
"""The escape of half of a surrogate pair in JSON, or of text that looks like one behind a backslash."""


class DuplicateKeyError(ValueError):
    """A key of a JSON object occurs twice."""


class _Strict(yaml.constructor.SafeConstructor):
    """Rejects duplicate keys, of which plain YAML silently takes the last, and values unknown to JSON."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node in self.recursive_objects:
            raise _error(node, "the section contains itself")
        try:
            value = super().construct_object(node, deep=True)
        except (ValueError, OverflowError) as error:
            raise _error(node, str(error)) from None
        if type(value) is int and not re.fullmatch(r"[+-]?(0|[1-9][\d_]*)", node.value):
            return node.value  # YAML 1.1 takes 12:00:00 and 0027 for numbers to another base
        if isinstance(value, datetime.date):
            raise _error(node, f"{node.value!r} is a date. Write it in quotes")
        if isinstance(value, bytes | set):
            raise _error(node, f"values with the tag {node.tag.rpartition(':')[2]!r} have no meaning here")
        if isinstance(value, str) and not value.isascii() and _has_surrogate(value):
            raise _error(node, "the text has half of a pair of Unicode surrogates")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise _error(key, f"the key {key.value!r} occurs twice")
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


class _Loader(_Strict, yaml.SafeLoader):
    """The loader in Python, whose errors are clear."""


class _FastLoader(_Strict, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The loader of libyaml, which takes a tenth of the time."""


def _error(node: yaml.Node, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML or JSON text; only JSON may be indented with tabs. Raises `yaml.YAMLError`."""
    with contextlib.suppress(yaml.YAMLError, RecursionError):
        return yaml.load(text, _FastLoader)
    try:
        return yaml.load(text, _Loader)
    except yaml.scanner.ScannerError:
        try:
            return parse_json(text)
        except ValueError:
            pass
        raise
    except RecursionError:
        raise yaml.YAMLError("the sections are nested too deeply") from None


def parse_json(text: str) -> Any:
    """Return the content of a JSON text; raise `json.JSONDecodeError` also for what Python cannot read.

    A `DuplicateKeyError` is raised for a key that occurs twice: DeepSpeed refuses it, other readers take the last.
    """
    if text.startswith("\ufeff"):
        problem = (
            "it starts with a byte order mark (BOM), which readers of JSON refuse. Save the file as UTF-8 without BOM"
        )
        raise json.JSONDecodeError(problem, text, 0)
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates)
    except (json.JSONDecodeError, DuplicateKeyError):
        raise
    except RecursionError:
        raise json.JSONDecodeError("the sections are nested too deeply", text, 0) from None
    except ValueError:
        number = re.search(rf"\d{{{_MAX_DIGITS + 1},}}", text)
        raise json.JSONDecodeError("the number has too many digits", text, number.start() if number else 0) from None
    if (half := _HALF_PAIR.search(text)) and _has_surrogate(json.dumps(value, ensure_ascii=False)):
        raise json.JSONDecodeError("the text has half of a pair of Unicode surrogates", text, half.start())
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise DuplicateKeyError(repr(next(name for name in names if names.count(name) > 1)))
    return values
