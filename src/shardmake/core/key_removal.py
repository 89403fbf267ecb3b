"""A unified diff that removes keys from a user's JSON or YAML file and leaves everything else as it is written."""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import yaml

_Pairs = list[tuple[yaml.Node, yaml.Node]]


@dataclass(frozen=True)
class _Entry:
    """Position of one key among those of its mapping."""

    mapping: yaml.MappingNode
    index: int


def removal_diff(name: str, text: str, keys: Iterable[str]) -> str:
    """Return the diff that removes the dotted ``keys`` from ``text``, the content of the file ``name``."""
    fixed = text
    for key in keys:
        fixed = _without(fixed, key.split("."))
    lines = difflib.unified_diff(text.splitlines(True), fixed.splitlines(True), name, name)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _without(text: str, path: list[str]) -> str:
    """Return ``text`` without one key, and without the sections that would be empty then."""
    # YAML includes JSON except for tabs between tokens.
    root = yaml.compose(text.replace("\t", " "), yaml.SafeLoader)
    entries = list(_entries(root, path))
    if len(entries) < len(path):
        return text
    while len(entries) > 1 and len(entries[-1].mapping.value) == 1:
        entries.pop()
    start, end = _span(text, entries[-1])
    return text[:start] + text[end:]


def _entries(node: yaml.Node | None, path: list[str]) -> Iterator[_Entry]:
    for name in path:
        if not isinstance(node, yaml.MappingNode):
            return
        found = [index for index, (key, _) in enumerate(node.value) if key.value == name]
        if not found:
            return
        yield _Entry(node, found[-1])
        node = node.value[found[-1]][1]


def _span(text: str, entry: _Entry) -> tuple[int, int]:
    """Return the start and the end of a key with its value and the comma or line break that belongs to it."""
    pairs: _Pairs = entry.mapping.value
    key, value = pairs[entry.index]
    if entry.index + 1 < len(pairs):
        return key.start_mark.index, pairs[entry.index + 1][0].start_mark.index
    end = value.end_mark.index
    if entry.mapping.flow_style:
        return (pairs[entry.index - 1][1].end_mark.index if entry.index else key.start_mark.index), end
    start = text.rfind("\n", 0, key.start_mark.index) + 1
    if text[end - 1 : end] == "\n":
        return start, end
    return start, text.find("\n", end) + 1 or len(text)
