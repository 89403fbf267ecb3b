"""Read from a script's source which training arguments it takes, and the values that it trains with otherwise.

Nothing of the script is run. Only what stands in the file itself is read: options of `argparse`, and one class of
training arguments of transformers or TRL, which a parser fills or the script calls. Everything else stays unknown.
"""

import ast
import dataclasses
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

_PARSERS: Final = ("HfArgumentParser", "TrlParser")
_FILE_READERS: Final = ("parse_json_file", "parse_yaml_file", "parse_dict")
_READERS: Final = ("parse_args", "parse_known_args", "parse_args_into_dataclasses", "parse_args_and_config")
_CHANGES: Final = ("set_defaults", "setattr", "set_training", "set_optimizer", "set_lr_scheduler", "set_dataloader")
"""Functions that change arguments, or their defaults."""
_OF_OPTIMIZER: Final = ("learning_rate", "weight_decay", "lr_scheduler_type")
"""Arguments of Trainer that it ignores if it is given an optimizer."""
_LIBRARIES: Final = ("transformers", "trl")
UNREAD: Final = object()
"""The value of an option whose default cannot be read, or that has none."""


@dataclass(frozen=True)
class OwnValue:
    """The value that a script trains with if nothing passes another; ``takes`` if it has an option for it."""

    value: Any
    takes: bool


def own_values(source: str) -> dict[str, OwnValue]:
    """Return the training arguments that ``source`` has by itself, by name; without those that it reads elsewhere."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    called = {_name(call.func) for call in calls}
    if any(map(_changes, calls)) or (not called.isdisjoint(_FILE_READERS) and called.isdisjoint(_READERS[2:])):
        return {}
    options = dict[str, OwnValue]()
    for name, one in _options(calls):  # those of subcommands may differ
        options[name] = one if options.get(name, one) == one else OwnValue(UNREAD, takes=True)
    elsewhere = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    if any(word.arg == "optimizers" for call in calls for word in call.keywords):
        elsewhere |= set(_OF_OPTIMIZER)
    return {name: one for name, one in (_of_class(nodes, calls) | options).items() if name not in elsewhere}


def _changes(call: ast.Call) -> bool:
    """Return True for a call that may give arguments other values than the command line and their defaults."""
    name, keywords = _name(call.func), {word.arg for word in call.keywords}
    if name in _READERS:
        return bool(call.args or keywords & {"args", "namespace", None})
    if name == "update":
        return re.match(r"vars\(|.*__dict__\.", ast.unparse(call.func)) is not None
    return name in _CHANGES or (name == "replace" and bool(keywords))


def _options(calls: list[ast.Call]) -> Iterator[tuple[str, OwnValue]]:
    """Yield the options of `argparse`, each with its default."""
    for call in calls:
        if _name(call.func) == "add_argument":
            given = {word.arg: word.value for word in call.keywords}
            default = UNREAD if None in given else _literal(given["default"]) if "default" in given else None
            is_converted = isinstance(default, str) and "type" in given and _name(given["type"]) != "str"
            if is_converted or len(call.args) > 1:
                default = UNREAD
            for word in call.args:
                if isinstance(name := _literal(word), str) and name.startswith("--"):
                    yield name[2:].replace("-", "_"), OwnValue(default, takes=True)


def _of_class(nodes: list[ast.AST], calls: list[ast.Call]) -> dict[str, OwnValue]:
    """Return the fields of the only class of training arguments that the source uses."""
    classes = _classes(nodes)
    built = [call for call in calls if _name(call.func) in classes]
    parsed = any(_name(call.func) in _PARSERS for call in calls)
    if parsed and not built and (own := _most_derived(nodes, classes)) is not None:
        return {name: OwnValue(value, takes=True) for name, value in classes[own].items()}
    if parsed or len(built) != 1 or built[0].args or any(word.arg is None for word in built[0].keywords):
        return {}
    given = {word.arg: _literal(word.value) for word in built[0].keywords if word.arg}
    values = classes[_name(built[0].func)] | given
    return {name: OwnValue(value, takes=False) for name, value in values.items() if value is not UNREAD}


def _classes(nodes: list[ast.AST]) -> dict[str, dict[str, Any]]:
    """Return the defaults of each class of training arguments, by the name of the class in the source."""
    names = {
        (one.asname or one.name): (node.module, one.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in _LIBRARIES
        for one in node.names
    }
    for node in nodes:  # transformers.TrainingArguments
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _LIBRARIES:
            names[node.attr] = (node.value.id, node.attr)
    found = {
        name: values
        for name, (module, attribute) in names.items()
        if attribute.endswith(("Arguments", "Config")) and (values := _library_defaults(module, attribute))
    }
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            for base in filter(found.__contains__, map(_name, node.bases)):
                found[node.name] = found[base] | dict(_fields(node))
    return found


def _most_derived(nodes: list[ast.AST], classes: Mapping[str, Any]) -> str | None:
    """Return the class that no other one extends; None if several are left."""
    extended = {_name(base) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases}
    left = [name for name in classes if name not in extended or len(classes) == 1]
    return left[0] if len(left) == 1 else None


def _library_defaults(module: str, attribute: str) -> dict[str, Any]:
    """Return the defaults of a library's class of training arguments; empty if it is none, or is not installed."""
    from transformers import TrainingArguments

    try:
        kind = getattr(importlib.import_module(module), attribute)
    except Exception:  # a library that is not installed, or fails at its import in its own way, such as by NameError
        return {}
    if not isinstance(kind, type) or not issubclass(kind, TrainingArguments):
        return {}
    return {one.name: _plain(one.default) for one in dataclasses.fields(kind)}


def _plain(value: Any) -> Any:
    plain = value.value if isinstance(value, Enum) else value
    return plain if plain is None or isinstance(plain, bool | int | float | str) else UNREAD


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """Yield each field of a data class with its default."""
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            value = line.value
            if isinstance(value, ast.Call):
                value = next((word.value for word in value.keywords if word.arg == "default"), None)
            yield line.target.id, UNREAD if value is None else _literal(value)


def _literal(node: ast.AST) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNREAD


def _name(node: ast.AST) -> str:
    """Return the last part of a dotted name; empty for another expression."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
