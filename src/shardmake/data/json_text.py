"""Messages in text, such as JSON in a cell of CSV, as opposed to JSON that is an answer."""

import json
import re
from collections.abc import Collection, Set
from contextlib import suppress
from typing import Any

from shardmake.core.errors import DataError


def holds_messages(text: str, value: Any, keys: Set[str], contents: Set[str], roles: Collection[str]) -> bool:
    """Return True if ``text`` is JSON of messages or of one, or what Python prints of a list; ``value`` is the JSON.

    Each has a role under one of ``keys``; at least one of these is among ``roles``, and one has a key of ``contents``.
    """
    if value is None:
        has_text, has_role = rf"'({_any(contents)})'\s*:", rf"'({_any(keys)})'\s*:\s*'({_any(roles)})'"
        return re.fullmatch(rf"(?s)\s*\[\s*\{{(?=.*{has_text}).*{has_role}.*\}}\s*\]\s*", text) is not None
    turns = value if isinstance(value, list) else [value]
    is_list = all(isinstance(turn, dict) and turn.keys() & keys for turn in turns)
    said = {str(turn.get(key)) for turn in turns for key in keys} if is_list else set()
    return not said.isdisjoint(roles) and any(turn.keys() & contents for turn in turns)


def read_json(text: str) -> Any:
    """Return the list or object in JSON that ``text`` is, and None for any other text."""
    with suppress(ValueError, RecursionError):
        return json.loads(text) if re.match(r"\s*[\[{]", text) else None


def parse(value: Any, place: str, kind: str, empty: Any) -> Any:
    """Return what JSON in text says, ``empty`` for no text, and any other value as it is.

    Raises `DataError` for other text; ``place`` begins its message, and ``kind`` is what to write.
    """
    try:
        return (json.loads(value) if value.strip() else empty) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{place} not valid JSON: {error}. Write {kind}.") from None


def keys_of_messages(value: Any) -> list[str]:
    """Return the keys of the first message, none for a value that is not a list of messages, or JSON of one."""
    value = read_json(value) if isinstance(value, str) else value
    return list(value[0]) if isinstance(value, list) and value and isinstance(value[0], dict) else []


def _any(words: Collection[str]) -> str:
    return "|".join(map(re.escape, sorted(words)))
