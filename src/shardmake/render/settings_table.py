"""The comparison of the settings that more than one of Trainer, DeepSpeed and Accelerate has.

A row of `shardmake.config.settings` says where each library keeps the setting. `shardmake.render.engine_values` reads
what will run from what the libraries understood (`shardmake.render.engine_settings`). `compare` makes a `Row` of each.
"""

import inspect
from collections.abc import Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from shardmake.config.deepspeed_keys import OPTIMIZER_REMOVED, is_removed_optimizer
from shardmake.config.settings import SETTINGS, Setting
from shardmake.config.user_file_keys import judge
from shardmake.config.user_files import UserFile
from shardmake.render import engine_values, parsers
from shardmake.render.comparison import Comparison, EngineSettings, Library, Problem, Row, Settings, Value
from shardmake.render.engine_settings import read_settings


def compare(settings: Settings, folder: Path) -> tuple[Comparison, EngineSettings]:
    """Return the comparison of ``settings`` and what was read; run it in a process of its own, with an empty folder."""
    unknown = {setting.name for setting in SETTINGS.values() if settings.is_unknown(setting)}
    found = read_settings(_assume_equal(settings, unknown), folder)
    hidden = {key for name in unknown for key in _keys(SETTINGS[name])}
    found.stops = {key: effect for key, effect in found.stops.items() if key not in hidden}
    rows = [] if "deepspeed" in settings.unknown or settings.is_open else [_engine_row(settings, found)]
    found.problems = [problem for problem in found.problems if problem.key not in found.stops]
    refused = {problem.key for problem in found.problems if problem.level == "error"}
    for setting in SETTINGS.values():
        if not setting.is_shared or setting.name in unknown:
            continue
        if refused.intersection(_keys(setting)) or (setting.name.startswith("FSDP") and found.fsdp is None):
            continue
        try:
            if values := _values(setting, settings, found):
                rows.append(_row(setting, values, found))
        except (TypeError, ValueError, AttributeError, ArithmeticError):  # a type that no library checks
            effect = "The libraries do not check the type of this value, and the run stops later."
            library: Library = "DeepSpeed" if setting.deepspeed_keys else "Trainer"
            key = (setting.deepspeed_keys or setting.trainer)[0]
            found.refuse(library, key, dict(parsers.leaves(found.deepspeed)).get(key), effect)
    return Comparison(rows, [*found.problems, *_impossible(found)]), found


def _assume_equal(settings: Settings, unknown: Set[str]) -> Settings:
    """Return ``settings`` with the DeepSpeed file's numbers in place of training arguments that only a shell knows."""
    given = dict(parsers.leaves(settings.deepspeed or {}))
    values = {
        argument: given[key]
        for name in unknown
        for key, argument in SETTINGS[name].filled.items()
        if isinstance(given.get(key), int | float) and argument not in (settings.trainer or {})
    }
    return replace(settings, trainer=values | settings.trainer) if settings.trainer is not None else settings


def _engine_row(settings: Settings, found: EngineSettings) -> Row:
    engine, values, asked = engine_values.engine_that_trains(found), dict[Library, Value](), None
    if settings.trainer is not None:
        by_file = settings.deepspeed is not None and settings.named_by_trainer
        asked = "DeepSpeed" if by_file else "FSDP" if settings.trainer.get("fsdp") else None
        values["Trainer"] = Value(asked, asked is not None, "deepspeed" if by_file else "fsdp")
    if found.launched is not None:
        kind = (settings.accelerate or {}).get("distributed_type")
        values["Accelerate"] = Value(kind, kind is not None, "distributed_type")
        asked = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP"}.get(str(kind), asked)
    if "fsdp" in found.stops:
        return Row("engine", values, None, "stops", found.stops["fsdp"])
    effect = "" if asked in (None, engine) else f"{engine} runs, silently."
    if settings.deepspeed is not None and not found.uses_deepspeed:
        effect = "The DeepSpeed file is not used: neither the training arguments nor the launcher name it."
    return Row("engine", values, engine, "differs" if effect else "equal", effect)


def _values(setting: Setting, settings: Settings, found: EngineSettings) -> dict[Library, Value]:
    values: dict[Library, Value] = {}
    if setting.trainer and found.arguments is not None:
        values["Trainer"] = _trainer_value(setting, settings, found)
    if setting.deepspeed_keys and found.config is not None:
        values["DeepSpeed"] = _deepspeed_value(setting, found)
    if (option := setting.option) is not None and found.launched is not None:
        written = _written_for_launcher(settings)
        has = option in written or not setting.deepspeed_keys or found.launcher == "deepspeed_launcher"
        if has and hasattr(found.launched, option):
            value = getattr(found.launched, option)
            values["Accelerate"] = Value(value, option in written, written.get(option, option))
    return values


def _trainer_value(setting: Setting, settings: Settings, found: EngineSettings) -> Value:
    given = dict(parsers.leaves(settings.trainer or {}))
    key = next((key for key in setting.trainer if key in given), setting.trainer[0])
    if key.startswith(engine_values.FSDP_SECTION):
        name = key.removeprefix(engine_values.FSDP_SECTION)
        defaults = found.arguments.fsdp_plugin_args or {}
        section = found.arguments.fsdp_config if isinstance(found.arguments.fsdp_config, dict) else {}
        value = section.get(name, defaults.get(engine_values.PLUGIN_NAMES.get(name, name)))
        return Value(value, key in given or key.replace(".", ".fsdp_") in given, key)
    return Value(engine_values.in_trainer(setting, key, found), key in given, setting.trainer_name or key)


def _deepspeed_value(setting: Setting, found: EngineSettings) -> Value:
    given = dict(parsers.leaves(found.deepspeed))
    written = [key for key in setting.deepspeed_keys if key in given]
    # Of two keys, the one that says yes: bf16.enabled beside fp16.enabled.
    key = next((key for key in written if given[key]), written[0] if written else setting.deepspeed_keys[0])
    if written:
        return Value(given[key], True, key)
    by_section = key.startswith(("optimizer.", "scheduler."))
    return Value(
        engine_values.in_deepspeed(key, found if by_section else replace(found, config=found.defaults)), False, key
    )


def _written_for_launcher(settings: Settings) -> dict[str, str]:
    """Return the written key of each option of `accelerate launch` that file or flags give."""
    written = settings.options
    for key, value in (settings.accelerate or {}).items():
        if isinstance(value, dict):
            prefix = f"{key.removesuffix('_config')}_" if key in ("fsdp_config", "dynamo_config") else ""
            names = {name: name if name.startswith(prefix) else f"{prefix}{name}" for name in map(str, value)}
            written = {full: f"{key}.{name}" for name, full in names.items()} | written
        else:
            written.setdefault(key, key)
    return written


def _row(setting: Setting, values: dict[Library, Value], found: EngineSettings) -> Row:
    stop = next((found.stops[key] for key in _keys(setting) if key in found.stops), None)
    if stop is not None:
        return Row(setting.name, values, None, "stops", stop)
    is_left = bool({*setting.deepspeed_keys} & {*found.left_to_script})
    runs = None if is_left else engine_values.value_that_trains(setting, found)
    written = {library: value for library, value in values.items() if value.written and value.value != "auto"}
    in_file = "DeepSpeed" in values and values["DeepSpeed"].written
    nobody = not written and "Trainer" in values and not in_file
    asking: dict[Library, Value] = {"Trainer": values["Trainer"]} if nobody else written
    asked = [engine_values.asked_by(library, setting, found, value.value) for library, value in asking.items()]
    if runs is None or all(value is None or same_value(setting.name, value, runs) for value in asked):
        return Row(setting.name, values, runs, "equal")
    return Row(setting.name, values, runs, "differs", f"{runs} runs, silently. {setting.advice}")


def _keys(setting: Setting) -> list[str]:
    return [*setting.deepspeed_keys, *([f"accelerate {setting.option}", setting.option] if setting.option else [])]


def same_value(setting: str, asked: Any, runs: Any) -> bool:
    """Return whether two values of the row ``setting`` mean the same."""
    if setting == "optimizer":
        return engine_values.optimizer_family(asked) == engine_values.optimizer_family(runs)
    if isinstance(asked, str) or isinstance(runs, str):
        asked, runs = (",".join(map(str, one)) if isinstance(one, list | tuple) else one for one in (asked, runs))
        return str(asked).lower() == str(runs).lower()
    asked, runs = (list(one) if isinstance(one, tuple) else one for one in (asked, runs))
    return bool(asked == runs)


def _impossible(found: EngineSettings) -> Iterator[Problem]:
    """Yield what DeepSpeed stops on only when it builds the optimizer."""
    if found.config is None:
        return
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    for which in ("offload_optimizer", "offload_param"):
        offload = getattr(found.config.zero_config, which)
        if offload is not None and engine_values.plain(offload.device) == "nvme" and offload.nvme_path is None:
            key = f"zero_optimization.{which}.nvme_path"
            yield Problem("DeepSpeed", key, None, "error", "Offload to NVMe needs a folder on the node's own disk.")
    yield from _impossible_schedule(found)
    yield from _facts(found)
    name, stage = found.config.optimizer_name, int(found.config.zero_optimization_stage)
    built = None if name is None else engine_values.optimizer_class(found)
    is_tested = name in ("lion", "muon") or built in ZERO_SUPPORTED_OPTIMIZERS
    effect = ""
    if name is not None and built is None and name not in DEEPSPEED_OPTIMIZERS:
        effect = OPTIMIZER_REMOVED if is_removed_optimizer(name) else "DeepSpeed stops: neither it nor torch has it."
    elif name is not None and stage and not found.config.zero_allow_untested_optimizer and not is_tested:
        effect = "DeepSpeed stops: with ZeRO it needs zero_allow_untested_optimizer: true."
    if effect:
        yield Problem("DeepSpeed", "optimizer.type", name, "error", effect)


def _facts(found: EngineSettings) -> Iterator[Problem]:
    """Yield the keys of the DeepSpeed file that do something else than they say: one key of each section and row."""
    seen = set()
    for one in judge(UserFile("deepspeed", "", found.deepspeed), is_script=True):
        group = (one.key.partition(".")[0], one.rule.fact)
        if one.rule.fact and not one.is_idle and one.rule.fate != "removed" and group not in seen:
            seen.add(group)
            level: Literal["warning", "note"] = "warning" if one.rule.fate in ("ignored", "unmergeable") else "note"
            yield Problem("DeepSpeed", one.key, one.value, level, one.rule.fact)


def _impossible_schedule(found: EngineSettings) -> Iterator[Problem]:
    name = found.config.scheduler_name
    if name is None:
        return
    known = engine_values.schedule_parameters(found)
    if not known:
        yield Problem("DeepSpeed", "scheduler.type", name, "error", "DeepSpeed stops: neither it nor torch has it.")
        return
    given = found.config.scheduler_params or {}
    written = (found.deepspeed.get("scheduler") or {}).get("params") or {}  # an "auto" is filled in, or named
    demanded = [key for key, one in known.items() if one.default is inspect.Parameter.empty]
    missing = [key for key in demanded if key not in given and written.get(key) != "auto"]
    unknown = [key for key in given if key not in known]
    for keys, effect in ((missing, "needs this parameter"), (unknown, "does not know this parameter")):
        for key in keys:
            stops = f"DeepSpeed stops: {name} {effect}."
            yield Problem("DeepSpeed", f"scheduler.params.{key}", given.get(key), "error", stops)
