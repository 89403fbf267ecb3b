"""Lists of messages in text, such as JSON in a cell of CSV, as opposed to JSON that is an answer."""

import json
import re
from collections.abc import Collection, Set
from contextlib import suppress
from typing import Any


def holds_messages(text: str, keys: Set[str], contents: Set[str], roles: Collection[str]) -> bool:
    """Return True if ``text`` is JSON of messages, or what Python prints of them.

    Each has a role under one of ``keys``; at least one of these is among ``roles``, and one has a key of ``contents``.
    """
    if not re.match(r"\s*\[\s*\{", text):
        return False
    try:
        turns = json.loads(text)
    except (ValueError, RecursionError):
        has_text, has_role = rf"'({_any(contents)})'\s*:", rf"'({_any(keys)})'\s*:\s*'({_any(roles)})'"
        return re.fullmatch(rf"(?s)(?=.*{has_text}).*{has_role}.*\}}\s*\]\s*", text) is not None
    is_list = all(isinstance(turn, dict) and turn.keys() & keys for turn in turns)
    said = {str(turn.get(key)) for turn in turns for key in keys} if is_list else set()
    return not said.isdisjoint(roles) and any(turn.keys() & contents for turn in turns)


def keys_of_messages(value: Any) -> list[str]:
    """Return the keys of the first message, none for a value that is not a list of messages, or JSON of one."""
    with suppress(ValueError, TypeError):
        value = json.loads(value)
    return list(value[0]) if isinstance(value, list) and value and isinstance(value[0], dict) else []


def _any(words: Collection[str]) -> str:
    return "|".join(map(re.escape, sorted(words)))
