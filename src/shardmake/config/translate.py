"""Translate a training file of another tool into a run: `shardmake init --from FILE`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardmake.config.effects import is_allowed
from shardmake.config.foreign_files import OFF, TOOLS, Row, Values, recognize
from shardmake.config.load import read_yaml
from shardmake.core.errors import ConfigError
from shardmake.core.nested import overlay

_SECTIONS: Final = ("dpo", "kto", "reward")
"""Sections of a run that belong to the objective of this name."""
_ON: Final = ("average_tokens_across_devices", "disable_dropout", "shuffle_merged_datasets")
"""Keys without a counterpart that are on unless a file turns them off."""


@dataclass(frozen=True)
class Translation:
    """A run made from a file of another tool, and what it does not say."""

    tool: str
    run: dict[str, Any]
    planned: dict[str, Any]
    """Keys that the plan decides instead."""
    untranslated: dict[str, Any]
    """Keys without a counterpart."""
    assumed: dict[str, Any]
    """Values of keys that the file leaves to the tool."""


def translate(path: Path, ranks: int, objective: str | None = None) -> Translation:
    """Return the run in the file ``path``; ``ranks`` multiply its batch, ``objective`` replaces what the file implies.

    Raises `ConfigError` for a file of no known tool.
    """
    given = read_yaml(path)
    tool = recognize(given)
    if tool is None:
        signs = "; ".join(f"{one.name}: {' and '.join(sorted(one.signs[0]))}" for one in TOOLS)
        raise ConfigError(f"--from: {path} is a file of none of the known tools. Their files have ({signs}).")
    steps, ratio = given.get("warmup_steps"), given.get("warmup_ratio")
    unused = "warmup_ratio" if steps or (steps is not None and ratio is None) else "warmup_steps" if ratio else None
    defaults = {key: value for key, value in tool.defaults.items() if key != unused}
    values = {key: value for key, value in {**defaults, "file": path, **given}.items() if key != unused}
    run: dict[str, Any] = {}
    untranslated: dict[str, Any] = {}
    for key, value in values.items():
        row = tool.keys.get(key)
        found = _found(row, value, values) if row else None
        untranslated |= found.pop("", {}) if found else {}
        if found is not None and all(is_allowed(*one) for one in found.items()):
            run = overlay(run, found)
        elif (
            key in given
            and (found or value not in OFF or key in _ON)
            and key not in (*tool.planned, *tool.idle, *tool.batch)
        ):
            untranslated[key] = value
    adapters = {key: value for key, value in tool.by_method.get(run.get("method", ""), {}).items() if key not in given}
    for key, value in adapters.items():
        run = overlay(run, _found(tool.keys[key], value, values) or {})
    size = [1 if values.get(key) is None else values[key] for key in tool.batch]
    if other := [key for key, one in zip(tool.batch, size, strict=True) if not isinstance(one, int) or one < 1]:
        raise ConfigError(f"--from: {path} has no whole number for {' and '.join(other)}. Write one.")
    run["global_batch_size"] = size[0] * size[1] * ranks
    if objective:
        run["objective"] = objective
    made = _consistent(run)
    for key in [key for key in given if key in tool.keys and given[key] not in OFF]:
        sections = {name.partition(".")[0] for name in _found(tool.keys[key], given[key], values) or {}}
        if sections and sections <= {*_SECTIONS} - made.keys():
            untranslated[key] = given[key]
    return Translation(
        tool.name,
        made,
        {key: given[key] for key in given if key in tool.planned},
        untranslated,
        {key: value for key, value in {**defaults, **adapters}.items() if key not in given},
    )


def _found(row: Row | None, value: Any, values: Values) -> dict[str, Any] | None:
    if isinstance(row, str):
        return None if value is None or value == "" else {row: value}
    found: dict[str, Any] | None = row(value, values) if row else None
    return found


def _consistent(run: dict[str, Any]) -> dict[str, Any]:
    """Return ``run`` without sections of other methods and objectives, and with one length."""
    objective, method = run.get("objective", "sft"), run.get("method", "full")
    dropped = {*_SECTIONS} - {objective} | ({"lora"} if method == "full" else set())
    if objective != "sft":  # TRL pads the examples, and turns dropout off
        dropped |= {"packing"}
        run = {**run, "lora": {key: value for key, value in run.get("lora", {}).items() if key != "dropout"}}
    dropped |= {"epochs"} if "max_steps" in run else set()
    return {key: value for key, value in run.items() if key not in dropped and value != {}}
