"""JSON schemas of the configuration models, and descriptions of allowed values.

Editors, ``config/README.md`` and the error messages use the schema.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

SchemaNode = Mapping[str, Any]
KEY_ITSELF = "[key]"
_LIMITS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
_SCALARS = {"integer": "a whole number", "number": "a number", "string": "text"}


def describe_keys(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Give each key a description in one line, which for most is the docstring in the source.

    Pydantic would read the source whenever a command starts.
    """
    texts = {}
    for part in model.__mro__[-3::-1]:  # without object and BaseModel
        (definition,) = ast.parse(inspect.getsource(part)).body
        assert isinstance(definition, ast.ClassDef)
        for pair in pairwise(definition.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[key] = text
    for key, node in schema["properties"].items():
        node["description"] = " ".join((node.get("description") or texts[key]).split())


class Schema:
    """The schema of one model."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.root: SchemaNode = model.model_json_schema()

    def options(self, node: SchemaNode) -> list[SchemaNode]:
        """Return the branches of a union, with references resolved and without null."""
        branches = node.get("anyOf", [node])
        return [self._resolved(branch) for branch in branches if branch.get("type") != "null"]

    def _resolved(self, node: SchemaNode) -> SchemaNode:
        reference = node.get("$ref")
        return self.root["$defs"][reference.rpartition("/")[2]] if reference else node

    def section(self, node: SchemaNode) -> SchemaNode | None:
        """Return the section that is allowed here, or None."""
        return next((option for option in self.options(node) if "properties" in option), None)

    def choices(self, node: SchemaNode) -> list[str]:
        """Return the allowed values of a choice."""
        return [str(value) for option in self.options(node) for value in _values(option)]

    def words(self, node: SchemaNode) -> list[str]:
        """Describe the allowed values; each value of a choice separately."""
        return list(dict.fromkeys(word for option in self.options(node) for word in self._words(option)))

    def _words(self, option: SchemaNode) -> list[str]:
        if values := _values(option):
            return [str(value) for value in values]
        if "properties" in option:
            return [f"the keys {', '.join(option['properties'])}"]
        if option["type"] == "array":
            return [f"a list of {' or '.join(self.words(option['items']))}"]
        if option["type"] == "object":
            return ["names, each with " + " or ".join(self.words(option["additionalProperties"]))]
        if option["type"] == "boolean":
            return ["true", "false"]
        return [f"{_SCALARS[option['type']]} {_limits(option)}".rstrip()]

    def sections(self, node: SchemaNode | None = None, name: str = "") -> Iterator[tuple[str, SchemaNode]]:
        """Yield every section below ``node`` with its dotted name, outer ones first.

        NAME is any name, and ENTRY an entry of a list.
        """
        section = self.section(node or self.root)
        if section is not None:
            yield name, section
            below = {f"{name}.{key}" if name else key: node for key, node in section["properties"].items()}
            for key in sorted(below, key=lambda key: any("items" in option for option in self.options(below[key]))):
                yield from self.sections(below[key], key)
        for option in self.options(node or self.root):
            if isinstance(option.get("additionalProperties"), Mapping):
                yield from self.sections(option["additionalProperties"], f"{name}.NAME")
            if isinstance(option.get("items"), Mapping):
                yield from self.sections(option["items"], f"{name}.ENTRY")

    def walk(self, location: Sequence[str | int]) -> tuple[list[str], SchemaNode]:
        """Return the keys on the path to a pydantic error, and the schema at its end (empty for an unknown key).

        Pydantic adds the branch of a union to the location. The branch is not a key of the file and is skipped.
        """
        node, keys = self.root, []
        parts = iter(location)
        for part in parts:
            options = self.options(node)
            if len(options) > 1:
                part = next(parts, KEY_ITSELF)
                options = [option for option in options if option["type"] == "array"]
            if part == KEY_ITSELF:
                break
            keys.append(str(part))
            node = _below(options[0], part)
        return keys, node


def _limits(option: SchemaNode) -> str:
    if "minimum" in option and "maximum" in option:
        return f"from {_digits(option['minimum'])} to {_digits(option['maximum'])}"
    return " and ".join(f"{sign} {_digits(option[limit])}" for limit, sign in _LIMITS.items() if limit in option)


def _digits(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"


def _values(option: SchemaNode) -> list[Any]:
    return option["enum"] if "enum" in option else [option["const"]] if "const" in option else []


def _below(node: SchemaNode, part: str | int) -> SchemaNode:
    """Return the schema of the key or index ``part`` of ``node``, empty if it is unknown."""
    if "properties" in node:
        return node["properties"].get(part, {})
    return node.get("items" if isinstance(part, int) else "additionalProperties", {})
