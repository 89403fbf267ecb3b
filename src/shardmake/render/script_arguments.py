"""Compare the arguments of a user's script, and the files that they name, with the plan before anything is queued.

`shardmake check` reads the same words with the same parsers. Values that only the nodes know are left out. What the
script itself decides is compared by its ranks (`shardmake.train.script_guard`).
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
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
_BATCH: Final = ("micro_batch_size", ACCUMULATION)
_PER_DEVICE: Final = SETTINGS["batch per rank"].trainer[0]


def check_script_arguments(choice: Choice, run: Run) -> list[str]:
    """Return a warning about arguments, by the names that programs give them, with other values than the run's.

    Raises `ConfigError` if something in ``script_args`` contradicts ``choice`` or a key that the run sets.
    """
    if run.script is None:
        return []
    source = ""
    with contextlib.suppress(ConfigError, OSError):  # a script that is not here
        source = script_file(run.script).read_text(errors="replace")
    variables = _variables(choice, run)
    filled = [Template(word).safe_substitute(variables) for word in run.script_args]
    words = list(_known_words(filled))
    length = next((value for name in _LENGTHS if (value := take(list(words), f"--{name}")) is not None), None)
    arguments = read_arguments(Command("script_args", "python", run.script, words))
    found = _values(arguments, length)
    steps = None if "accum" in source else 1
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
    others = [*_others(filled, found, steps, choice, run)]
    is_first_gpu = choice.is_deepspeed and re.search(r"--local_rank\b[^)]*default=0", source)
    if is_first_gpu and "LOCAL_RANK" not in source and "local_rank" not in " ".join(run.script_args):
        others.append("  --local_rank is not among script_args, and is 0 for every rank. Add --local_rank $LOCAL_RANK.")
    return ["\n".join([f"{run.script} trains with other values than the run:", *others])] if others else []


def _others(words: list[str], found: Mapping[str, Any], steps: int | None, choice: Choice, run: Run) -> Iterator[str]:
    """Yield a line for each value of ``words`` that is not the run's; ``steps`` accumulate if none of them says it."""
    names = {key: (name,) for name, key in _compared().items()} | _NAMES
    wanted = {key: getattr(run, key) for key in names if key in run.model_fields_set}
    if choice.is_deepspeed:
        wanted.pop("max_grad_norm", None)  # DeepSpeed clips to the run's
    wanted |= {key: getattr(choice, key) for key in _BATCH}
    given = {key: value for key in wanted if (value := _given(names[key], words, found)) is not None}
    micro, accumulated = given.get("micro_batch_size"), given.get(ACCUMULATION, steps)
    total = micro * accumulated * choice.data_parallel if micro and accumulated else None
    for key, value in given.items():
        is_split = key in _BATCH and total in (None, choice.global_batch_size)
        if wanted[key] is not None and not is_split and not same(value, wanted[key]):
            yield f"  {key} is {wanted[key]}, but script_args have {value}. {_pass_it(key, value)}"


def _given(names: tuple[str, ...], words: list[str], found: Mapping[str, Any]) -> Any:
    """Return the number that an argument, as in argparse the last one, or a file gives to one of ``names``, or None."""
    for word, follows in reversed([*zip(words, [*words, ""][1:], strict=True)]):
        option, sign, text = word.partition("=")
        if (sign or word.startswith("--")) and option.lstrip("-").replace("-", "_") in names:
            with contextlib.suppress(ValueError):
                if type(number := json.loads(text if sign else follows)) in (int, float):
                    return number
    return next((found[name] for name in names if found.get(name) is not None), None)


def _pass_it(key: str, value: Any) -> str:
    """Return how a script and its run come to one value of ``key``; ``value`` is the script's."""
    either = "" if key in _BATCH else f", or set {key}: {value}"
    return (f"Pass ${PREFIX}{key.upper()}{either}" if key in _NAMES else f"Use one of both{either}") + "."


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
