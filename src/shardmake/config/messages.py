"""Messages about configuration errors: the key, the value, the allowed values and the nearest spelling."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from shardmake.config.schema import KEY_ITSELF, Schema
from shardmake.core.errors import nearest

Detail = Mapping[str, Any]


def error_lines(model: type[BaseModel], error: ValidationError) -> list[str]:
    """Return one line per wrong key.

    Pydantic reports one error per branch of a union. Only the first is kept, or an error of a nested key.
    """
    schema, messages = Schema(model), dict[str, str]()
    for detail in error.errors():
        key = ".".join(schema.walk(detail["loc"])[0])
        messages.setdefault(key, _message(schema, detail))
    deepest = [key for key in messages if not any(other.startswith(f"{key}.") for other in messages)]
    return [f"{key}: {messages[key]}" if key else messages[key] for key in deepest]


def _message(schema: Schema, detail: Detail) -> str:
    if detail["type"] == "extra_forbidden":
        return _unknown_key(schema, detail)
    if detail["type"] == "missing":
        return "this key is required and missing."
    if detail["type"] == "value_error":
        return f"{detail['msg'].removeprefix('Value error, ')}."
    if detail["loc"][-1:] == (KEY_ITSELF,):
        return "YAML reads this name as a number or as true or false. Put it in quotes."
    return _wrong_value(schema, detail)


def _unknown_key(schema: Schema, detail: Detail) -> str:
    section = schema.section(schema.walk(detail["loc"][:-1])[1])
    assert section is not None
    allowed = list(section["properties"])
    return f"there is no such key.{nearest(str(detail['loc'][-1]), allowed)} Allowed here: {', '.join(allowed)}."


def _wrong_value(schema: Schema, detail: Detail) -> str:
    value, (_, node) = detail["input"], schema.walk(detail["loc"])
    problem = "the value is missing" if value is None else f"{value!r} is not allowed"
    suggestion = nearest(value, schema.choices(node)) if isinstance(value, str) else ""
    words = schema.words(node)
    return f"{problem}.{suggestion} Allowed: {', '.join(words)}.{_yaml_hint(value, words)}"


def _yaml_hint(value: Any, allowed: list[str]) -> str:
    """Explain a value that YAML reads as another type than text."""
    if isinstance(value, bool) and "text" in allowed:
        return " YAML reads on, off, yes and no as true or false. Put the word in quotes."
    if isinstance(value, int | float) and "text" in allowed:
        return " YAML reads this as a number, also a time such as 12:00:00. Put it in quotes."
    return ""
