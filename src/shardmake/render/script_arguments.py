"""Compare the arguments of a user's script, and the files that they name, with the plan before anything is queued.

`shardmake check` reads the same words with the same parsers. Values that only the nodes know are left out. A key that
no argument passes is reported if the script's source shows what it trains with instead. What the script itself decides
is compared by its ranks (`shardmake.train.script_guard`).
"""

import ast
import contextlib
import dataclasses
import importlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from string import Template
from typing import Any, Final

from shardmake.config.models import Run
from shardmake.config.script_file import PREFIX, VARIABLE_KEYS, script_file
from shardmake.config.settings import ACCUMULATION, MICRO_BATCH, SETTINGS, TOTAL_BATCH
from shardmake.config.user_file_keys import contradictions
from shardmake.config.user_files import UserFile
from shardmake.core.errors import ConfigError
from shardmake.core.nested import leaves, same
from shardmake.render.command_lines import Arguments, Command, read_arguments, take
from shardmake.render.lint import read_source
from shardmake.run.own_files import planned_values
from shardmake.run.plan import Choice

UNREAD: Final = object()
"""The value of an option whose default cannot be read, or that has none."""
_LENGTHS: Final = ("max_length", "max_seq_length", "model_max_length", "block_size")
"""Names that programs give to the tokens of a sequence."""
_OTHERS: Final = ("optimizer", "warm-up steps")
"""Settings that a run and Trainer name or count in different ways."""
_NAMES: Final = {
    "learning_rate": ("learning_rate", "lr"),
    "max_steps": ("max_steps", "max_train_steps", "steps"),
    "epochs": ("num_train_epochs", "num_epochs", "epochs"),
    "sequence_length": (*_LENGTHS, "seq_length", "seq_len", "sequence_length"),
    "micro_batch_size": ("per_device_train_batch_size", "micro_batch_size", TOTAL_BATCH, "batch_size"),
    ACCUMULATION: (ACCUMULATION,),
}
"""Names that programs give to the values that a variable passes, by the end of the variable's name."""
_FILES: Final = (".yaml", ".yml", ".json", ".toml")
_BATCH: Final = ("micro_batch_size", ACCUMULATION)
_PER_DEVICE: Final = SETTINGS["batch per rank"].trainer[0]


@dataclass(frozen=True)
class OwnValue:
    """The value that a script trains with if nothing passes another; ``takes`` if it has an option for it."""

    value: Any
    takes: bool


def check_script_arguments(choice: Choice, run: Run) -> list[str]:
    """Return a warning about the keys of the run that reach the script neither as arguments nor by its source.

    Raises `ConfigError` if something in ``script_args`` contradicts ``choice`` or a key that the run sets.
    """
    if run.script is None:
        return []
    source = ""
    with contextlib.suppress(ConfigError, OSError):  # a script that is not here
        source = script_file(run.script).read_text(errors="replace")
    own = own_values(source)
    variables = _variables(choice, run)
    filled = [Template(word).safe_substitute(variables) for word in run.script_args]
    words = list(_known_words(filled))
    length = next((value for name in _LENGTHS if (value := take(list(words), f"--{name}")) is not None), None)
    arguments = read_arguments(Command("script_args", "python", run.script, words))
    found = _values(arguments, length)
    steps = own[ACCUMULATION].value if ACCUMULATION in own else None if ACCUMULATION in source else 1
    lines = [*_sizes(_PER_DEVICE, {ACCUMULATION: steps} | found, choice), *_settings(found, run)]
    lines += [
        f"  {half} is true, but the plan's precision is {choice.precision}. Set precision: {half} in the run."
        for half in ("bf16", "fp16")
        if found.get(half) is True and choice.precision != half
    ]
    named = _read(arguments.deepspeed) if arguments.deepspeed else None
    if named is not None and named.kind == "deepspeed":
        lines += _deepspeed_file(named, choice, run, is_native=arguments.is_native)
    if lines:
        raise ConfigError("\n".join(["The script's arguments contradict the run, and its ranks would stop:", *lines]))
    if re.search(rf"{PREFIX}[\"'{{]", source) or _is_open(run.script_args, arguments):
        return []
    missing = [*_missing(own, found, filled, source, choice, run)]
    return ["\n".join([f"{run.script} trains with other values than the run:", *missing])] if missing else []


def _is_open(words: list[str], arguments: Arguments) -> bool:
    """Return whether the script may have arguments that are not read: of a file, or of a variable of the nodes."""
    before = dict(zip(words[1:], words, strict=False))
    hidden = [word for word in words if word.startswith("@") or (word.startswith("$") and PREFIX not in word)]
    files = {*arguments.files, *(word.rpartition("=")[2] for word in words if word.endswith(_FILES))}
    return any(not before.get(word, "").startswith("--") for word in hidden) or any(
        (source := _read(name)) is None or name not in arguments.files or source.kind != "training"
        for name in files - {arguments.deepspeed}
    )


def _missing(
    own: Mapping[str, OwnValue], found: Mapping[str, Any], words: list[str], source: str, choice: Choice, run: Run
) -> Iterator[str]:
    """Yield a line for each value that the script is not given and has by itself as another one."""
    names = {key: (name,) for name, key in _compared().items()} | _NAMES
    wanted = {key: getattr(run, key) for key in names if key in run.model_fields_set}
    if choice.is_deepspeed:
        wanted.pop("max_grad_norm", None)  # DeepSpeed clips to the run's
    lines, sizes = {}, []
    for key, value in (wanted | {key: getattr(choice, key) for key in _BATCH}).items():
        name = next((name for name in names[key] if name in own), "")
        is_given, used = _given(names[key], words, found, own)
        if f"{PREFIX}{key.upper()}" in source or any(f"{PREFIX}{key.upper()}" in word for word in run.script_args):
            is_given, used = True, value
        elif not is_given:
            used = own[name].value if name else 1 if key == ACCUMULATION and "accum" not in source else UNREAD
        if key in _BATCH:
            sizes.append(used)
        if value is None or used is UNREAD or used is None or same(used, value):
            continue
        if is_given:
            lines[key] = f"  {key} is {value}, but script_args have {used}. {_pass_it(key, used)}"
        elif name:
            lines[key] = f"  {key} is {value}, but {_unpassed(key, value, name, own[name])}"
    known = all(isinstance(size, int) for size in sizes)
    if not known or math.prod(sizes) * choice.data_parallel == choice.global_batch_size:
        lines = {key: line for key, line in lines.items() if key not in _BATCH}
    yield from lines.values()
    if (
        choice.is_deepspeed
        and "local_rank" in own
        and own["local_rank"].value == 0
        and not ("environ" in source and "LOCAL_RANK" in source)
        and not _given(("local_rank",), words, {}, own)[0]
    ):
        yield "  --local_rank is not among script_args, and is 0 for every rank. Add --local_rank $LOCAL_RANK."


def _given(
    names: tuple[str, ...], words: list[str], found: Mapping[str, Any], own: Mapping[str, OwnValue]
) -> tuple[bool, Any]:
    """Return whether an argument or a file gives one of ``names``, which may be abbreviated, and a value of it."""
    for name in names:
        if found.get(name) is not None:
            return True, found[name]
    for index, word in enumerate(words):
        option, sign, text = word.partition("=")
        option = option.lstrip("-").replace("-", "_")
        is_one = (word.startswith("--") or sign) and option
        if is_one and any(one == option or (option not in own and one.startswith(option)) for one in names):
            with contextlib.suppress(ValueError):
                if type(number := json.loads(text if sign else " ".join(words[index + 1 : index + 2]))) in (int, float):
                    return True, number
            return True, UNREAD
    return False, UNREAD


def _pass_it(key: str, value: Any) -> str:
    """Return how a script and its run come to one value of ``key``; ``value`` is the script's."""
    either = "" if key in _BATCH else f", or set {key}: {value}"
    return (f"Pass ${PREFIX}{key.upper()}{either}" if key in _NAMES else f"Use one of both{either}") + "."


def _unpassed(key: str, value: Any, name: str, own: OwnValue) -> str:
    """Return what the script has instead of the run's value, and what passes it."""
    passed = f"${PREFIX}{key.upper()}" if key in _NAMES else value
    if own.takes:
        return f"--{name} is not among script_args, and its default is {own.value}. Add --{name} {passed}."
    either = "" if key in _BATCH else f", or set {key}: {own.value}"
    return f"the script itself has {name} {own.value}. Use {passed} there{either}."


def _variables(choice: Choice, run: Run) -> dict[str, str]:
    """Return the variables of `script_environment` whose value the plan or the run has."""
    values = {key: getattr(run, key) for key in ("sequence_length", *VARIABLE_KEYS.values(), "seed")}
    values |= {key: getattr(choice, key) for key in _BATCH}
    return {f"{PREFIX}{key.upper()}": str(value) for key, value in values.items() if value is not None}


def _known_words(words: list[str]) -> Iterator[str]:
    """Yield ``words`` without each option whose value only a node knows."""
    for word, follows in zip(words, [*words, ""][1:], strict=True):
        if "$" not in word and not (word.startswith("--") and "=" not in word and "$" in follows):
            yield word


def _values(arguments: Arguments, length: str | None) -> dict[str, Any]:
    """Return the training arguments of the command line, and below them those of the files that it names."""
    values: dict[str, Any] = {}
    for name in arguments.files:
        source = _read(name)
        values |= source.values if source is not None and source.kind == "training" else {}
    values |= arguments.trainer or {}
    known = next((values[name] for name in _LENGTHS if name in values), None)
    return values | {"sequence_length": int(length) if length and length.isdecimal() else known}


def _read(name: str) -> UserFile | None:
    """Return a file as `shardmake check` reads it; None for one that it does not know, or that is not here."""
    try:
        return read_source(Path(name)) if Path(name).is_file() else None
    except ConfigError:
        return None


def _sizes(name: str, found: Mapping[str, Any], choice: Choice) -> Iterator[str]:
    """Yield a line if the sequences of a forward pass, by ``name``, make another global batch than the planned one."""
    micro, steps = found.get(name), found.get(ACCUMULATION, 1)
    if not isinstance(micro, int) or not isinstance(steps, int):
        return
    total = micro * steps * choice.data_parallel
    if total != choice.global_batch_size:
        yield (
            f"  {name} {micro} x {ACCUMULATION} {steps} x {choice.data_parallel} readers is "
            f"{total}, but global_batch_size is {choice.global_batch_size}. Pass $SHARDMAKE_MICRO_BATCH_SIZE and "
            f"$SHARDMAKE_GRADIENT_ACCUMULATION_STEPS, or set global_batch_size: {total} and micro_batch_size: {micro}."
        )


def _settings(found: Mapping[str, Any], run: Run) -> Iterator[str]:
    """Yield a line for each key that the run sets and the arguments set to another value."""
    for name, key in (_compared() | {"sequence_length": "sequence_length"}).items():
        value, wanted = found.get(name), getattr(run, key)
        if isinstance(value, str) and isinstance(wanted, Mapping):  # as TrainingArguments reads it
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        if value is not None and key in run.model_fields_set and wanted is not None and not same(value, wanted):
            yield f"  {name} is {value}, but {key} is {wanted} in the run. {_pass_it(key, value)}"


def _compared() -> dict[str, str]:
    """Return the keys of a run whose values are those of one argument of Trainer, by that argument."""
    rows = (row for row in SETTINGS.values() if len(row.trainer) == 1 and row.planned is None)
    return {row.trainer[0]: row.key for row in rows if row.key and row.name not in _OTHERS}


def _deepspeed_file(file: UserFile, choice: Choice, run: Run, *, is_native: bool) -> Iterator[str]:
    """Yield a line for each value of the script's own DeepSpeed file that is not the planned one."""
    if not choice.is_deepspeed:
        yield f"  {file.name} is a DeepSpeed file, but the plan's strategy is {choice.strategy}. Set strategy: zero2."
        return
    values = dict(leaves(file.values))
    planned = planned_values(choice, run)["deepspeed"]
    if is_native and (unfilled := [key for key, value in values.items() if value == "auto"]):
        yield (
            f'  {file.name}: {", ".join(unfilled)} is "auto", which only Trainer and Accelerate fill in; '
            "deepspeed.initialize stops. Pass $SHARDMAKE_DEEPSPEED_CONFIG, which has numbers."
        )
    if is_native and TOTAL_BATCH not in values:
        yield from _sizes(MICRO_BATCH, values, choice)
    for key in contradictions(file, planned, is_script=True):
        if key in planned and key not in (MICRO_BATCH, ACCUMULATION):
            row = next(row for row in SETTINGS.values() if key in row.deepspeed)
            advice = f"{row.key}: {values[key]}" if key == TOTAL_BATCH else f"{row.key or 'strategy'} in the run"
            yield (
                f"  {file.name}: {key} is {values[key]!r}, planned is {planned[key]!r}. Change the file, pass "
                f"$SHARDMAKE_DEEPSPEED_CONFIG instead, or set {advice}."
            )


# --- what the source of the script shows -----------------------------------------------------------------------------

# Nothing of the script is run. Only what stands in the file itself is read: options of `argparse`, and one class of
# training arguments of transformers or TRL, which a parser fills or the script calls. Everything else stays unknown.

_PARSERS: Final = ("HfArgumentParser", "TrlParser")
_FILE_READERS: Final = ("parse_json_file", "parse_yaml_file", "parse_dict")
_READERS: Final = ("parse_args", "parse_known_args", "parse_args_into_dataclasses", "parse_args_and_config")
_CHANGES: Final = ("set_defaults", "setattr", "set_training", "set_optimizer", "set_lr_scheduler", "set_dataloader")
"""Functions that change arguments, or their defaults."""
_OF_OPTIMIZER: Final = ("learning_rate", "weight_decay", "lr_scheduler_type")
"""Arguments of Trainer that it ignores if it is given an optimizer."""
_LIBRARIES: Final = ("transformers", "trl")


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
