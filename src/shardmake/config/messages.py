"""What is wrong with a configuration file, a sentence a key: the value, what is allowed, the nearest spelling."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from shardmake.config.schema import KEY_ITSELF, Schema
from shardmake.core.errors import nearest

Detail = Mapping[str, Any]


def error_lines(model: type[BaseModel], error: ValidationError) -> list[str]:
    """One line per key that is wrong. A union complains once per branch: the first is heard, or one further in."""
    schema, sentences = Schema(model), dict[str, str]()
    for detail in error.errors():
        key = ".".join(schema.walk(detail["loc"])[0])
        sentences.setdefault(key, _sentence(schema, detail))
    deepest = [key for key in sentences if not any(other.startswith(f"{key}.") for other in sentences)]
    return [f"{key}: {sentences[key]}" if key else sentences[key] for key in deepest]


def _sentence(schema: Schema, detail: Detail) -> str:
    if detail["type"] == "extra_forbidden":
        return _unknown_key(schema, detail)
    if detail["type"] == "missing":
        return "this key is required and missing."
    if detail["type"] == "value_error":
        return f"{detail['msg'].removeprefix('Value error, ')}."
    if detail["loc"][-1:] == (KEY_ITSELF,):
        return "YAML reads this name as a number or a truth value; put it in quotes."
    return _wrong_value(schema, detail)


def _unknown_key(schema: Schema, detail: Detail) -> str:
    section = schema.section(schema.walk(detail["loc"][:-1])[1])
    assert section is not None
    allowed = list(section["properties"])
    return f"there is no such key.{nearest(str(detail['loc'][-1]), allowed)} Allowed here: {', '.join(allowed)}."


def _wrong_value(schema: Schema, detail: Detail) -> str:
    value, (_, node) = detail["input"], schema.walk(detail["loc"])
    said = "there is no value" if value is None else f"{value!r} is not allowed"
    suggestion = nearest(value, schema.choices(node)) if isinstance(value, str) else ""
    words = schema.words(node)
    return f"{said}.{suggestion} Allowed: {', '.join(words)}.{_yaml_hint(value, words)}"


def _yaml_hint(value: Any, allowed: list[str]) -> str:
    """Why a value may not be what its writer sees in the file."""
    if isinstance(value, bool) and "text" in allowed:
        return " YAML reads on, off, yes and no as truth values; put it in quotes to mean the word."
    if isinstance(value, int | float) and "text" in allowed:
        return " YAML reads a number here, as it does from a time such as 12:00:00; put it in quotes."
    return ""
