"""JSON schemas of the configuration models, and in words what a key may hold.

Editors, the reference in ``config/README.md`` and the messages about wrong values all draw on the schema.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

SchemaNode = Mapping[str, Any]
KEY_ITSELF = "[key]"
_LIMITS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
_SCALARS = {"integer": "a whole number", "number": "a number", "string": "text"}


class Schema:
    """The schema of one model."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.root: SchemaNode = model.model_json_schema()

    def options(self, node: SchemaNode) -> list[SchemaNode]:
        """What may stand here, one by one: the branches of a union, references followed, "nothing" left out."""
        branches = node.get("anyOf", [node])
        return [self._resolved(branch) for branch in branches if branch.get("type") != "null"]

    def _resolved(self, node: SchemaNode) -> SchemaNode:
        reference = node.get("$ref")
        return self.root["$defs"][reference.rpartition("/")[2]] if reference else node

    def section(self, node: SchemaNode) -> SchemaNode | None:
        """The section with keys of its own that may stand here, if any."""
        return next((option for option in self.options(node) if "properties" in option), None)

    def choices(self, node: SchemaNode) -> list[str]:
        """The values of a choice that may stand here."""
        return [str(value) for option in self.options(node) for value in _values(option)]

    def words(self, node: SchemaNode) -> list[str]:
        """What may stand here, in words; choices one by one."""
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
        limits = [f"{sign} {option[limit]:g}" for limit, sign in _LIMITS.items() if limit in option]
        return [" ".join([_SCALARS[option["type"]], " and ".join(limits)]).rstrip()]

    def sections(self, node: SchemaNode | None = None, name: str = "") -> Iterator[tuple[str, SchemaNode]]:
        """Every section from ``node`` on with its dotted name, outer before inner; NAME stands for a free name."""
        section = self.section(node or self.root)
        if section is not None:
            yield name, section
            for key, below in section["properties"].items():
                yield from self.sections(below, f"{name}.{key}" if name else key)
        for option in self.options(node or self.root):
            if isinstance(option.get("additionalProperties"), Mapping):
                yield from self.sections(option["additionalProperties"], f"{name}.NAME")

    def walk(self, location: Sequence[str | int]) -> tuple[list[str], SchemaNode]:
        """The keys on the way to a pydantic error, and what may stand at its end (empty for an unknown key).

        Pydantic puts the branch of a union into the location; that is no key of the file and is left out.
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


def _values(option: SchemaNode) -> list[Any]:
    return option["enum"] if "enum" in option else [option["const"]] if "const" in option else []


def _below(node: SchemaNode, part: str | int) -> SchemaNode:
    """What may stand under the key or index ``part`` of ``node``; an empty node where nothing is known of it."""
    if "properties" in node:
        return node["properties"].get(part, {})
    return node.get("items" if isinstance(part, int) else "additionalProperties", {})
