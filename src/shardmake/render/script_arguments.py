"""Compare the arguments of a user's script, and the files that they name, with the plan before anything is queued.

`shardmake check` reads the same words with the same parsers. Values that only the nodes know are left out. What the
script itself decides is compared by its ranks (`shardmake.train.script_guard`).
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any, Final

from shardmake.config.models import Run
from shardmake.config.script_file import PREFIX
from shardmake.config.settings import ACCUMULATION, MICRO_BATCH, SETTINGS, TOTAL_BATCH
from shardmake.config.user_file_keys import contradictions
from shardmake.config.user_files import UserFile
from shardmake.core.errors import ConfigError
from shardmake.core.nested import leaves, same
from shardmake.render.command_lines import Arguments, Command, read_arguments, take
from shardmake.render.lint import ConfigFile, read_source
from shardmake.run.own_files import planned_values
from shardmake.run.plan import Choice

_LENGTHS: Final = ("max_length", "max_seq_length", "model_max_length", "block_size")
"""Names that programs give to the tokens of a sequence."""
_OTHERS: Final = ("optimizer", "warm-up steps")
"""Settings that a run and Trainer name or count in different ways."""
_NATIVE: Final = "--deepspeed_config"


def check_script_arguments(choice: Choice, run: Run) -> None:
    """Raise `ConfigError` with everything in ``script_args`` that contradicts ``choice`` or a key that the run sets."""
    if run.script is None:
        return
    words = list(_known_words(run.script_args, _variables(choice, run)))
    length = next((value for name in _LENGTHS if (value := take(list(words), f"--{name}")) is not None), None)
    arguments = read_arguments(Command("script_args", "python", run.script, words))
    found = _values(arguments, length)
    lines = [*_sizes(found, choice), *_settings(found, run), *_precision(found, choice)]
    named = _read(arguments.deepspeed) if arguments.deepspeed else None
    if named is not None and named.kind == "deepspeed":
        is_native = any(word.partition("=")[0] == _NATIVE for word in words)
        lines += _deepspeed_file(UserFile("deepspeed", named.name, named.values), choice, run, is_native=is_native)
    if lines:
        raise ConfigError("\n".join(["The script's arguments contradict the run, and its ranks would stop:", *lines]))


def _variables(choice: Choice, run: Run) -> dict[str, str]:
    """Return the variables of `script_environment` whose value the plan or the run has."""
    values = {
        "SEQUENCE_LENGTH": run.sequence_length,
        "MICRO_BATCH_SIZE": choice.micro_batch_size,
        "GRADIENT_ACCUMULATION_STEPS": choice.gradient_accumulation_steps,
        "LEARNING_RATE": run.learning_rate,
        "MAX_STEPS": run.max_steps,
        "EPOCHS": run.epochs,
        "SEED": run.seed,
    }
    return {f"{PREFIX}{name}": str(value) for name, value in values.items() if value is not None}


def _known_words(words: list[str], variables: Mapping[str, str]) -> Iterator[str]:
    """Yield ``words`` with ``variables`` in place, without each option whose value only a node knows."""
    filled = [Template(word).safe_substitute(variables) for word in words]
    for word, follows in zip(filled, [*filled[1:], ""], strict=True):
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


def _read(name: str) -> ConfigFile | None:
    """Return a file as `shardmake check` reads it; None for one that it does not know, or that is not here."""
    try:
        return read_source(Path(name)) if Path(name).is_file() else None
    except ConfigError:
        return None


def _sizes(found: Mapping[str, Any], choice: Choice) -> Iterator[str]:
    micro, steps = found.get(SETTINGS["batch per rank"].trainer[0]), found.get(ACCUMULATION, 1)
    if not isinstance(micro, int) or not isinstance(steps, int):
        return
    total = micro * steps * choice.data_parallel
    if total != choice.global_batch_size:
        yield (
            f"  per_device_train_batch_size {micro} x {ACCUMULATION} {steps} x {choice.data_parallel} readers is "
            f"{total}, but global_batch_size is {choice.global_batch_size}. Pass $SHARDMAKE_MICRO_BATCH_SIZE and "
            f"$SHARDMAKE_GRADIENT_ACCUMULATION_STEPS, or set global_batch_size: {total} and micro_batch_size: {micro}."
        )


def _settings(found: Mapping[str, Any], run: Run) -> Iterator[str]:
    """Yield a line for each key that the run sets and the arguments set to another value."""
    rows = (row for row in SETTINGS.values() if len(row.trainer) == 1 and row.planned is None)
    keys = {row.trainer[0]: row.key for row in rows if row.key and row.name not in _OTHERS}
    for name, key in (keys | {"sequence_length": "sequence_length"}).items():
        value, wanted = found.get(name), getattr(run, key)
        if isinstance(value, str) and isinstance(wanted, Mapping):  # as TrainingArguments reads it
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        if value is not None and key in run.model_fields_set and wanted is not None and not same(value, wanted):
            pass_it = f"Pass ${PREFIX}{key.upper()}, or" if f"{PREFIX}{key.upper()}" in _NAMES else "Use one of both:"
            yield f"  {name} is {value}, but {key} is {wanted} in the run. {pass_it} set {key}: {value}."


_NAMES: Final = {f"{PREFIX}{name}" for name in ("LEARNING_RATE", "MAX_STEPS", "EPOCHS", "SEQUENCE_LENGTH")}


def _precision(found: Mapping[str, Any], choice: Choice) -> Iterator[str]:
    for half in ("bf16", "fp16"):
        if found.get(half) is True and choice.precision != half:
            yield f"  {half} is true, but the plan's precision is {choice.precision}. Set precision: {half} in the run."


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
    for key in contradictions(file, planned, is_script=True):
        if key in planned and key not in (MICRO_BATCH, ACCUMULATION):
            row = next(row for row in SETTINGS.values() if key in row.deepspeed)
            advice = f"{row.key}: {values[key]}" if key == TOTAL_BATCH else f"{row.key or 'strategy'} in the run"
            yield (
                f"  {file.name}: {key} is {values[key]!r}, planned is {planned[key]!r}. Change the file, pass "
                f"$SHARDMAKE_DEEPSPEED_CONFIG instead, or set {advice}."
            )
