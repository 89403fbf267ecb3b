"""Compare a run's own DeepSpeed and Accelerate files with a choice of the plan."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any, Final

from shardmake.config.models import Run
from shardmake.config.settings import ACCELERATE_STOPS, SETTINGS
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.config.user_file_keys import contradictions, estimated_values, refusals
from shardmake.config.user_files import Kind, UserFile, UserFiles
from shardmake.core.errors import ConfigError
from shardmake.core.nested import leaves, same
from shardmake.core.units import plural
from shardmake.run.plan import Choice

Planned = Mapping[str, Any]
"""The planned value of each dotted key of one file."""
_STAGE_AND_OFFLOAD: Final = tuple(
    SETTINGS[name].deepspeed[0] for name in ("ZeRO stage", "optimizer offload", "parameter offload")
)


def planned_values(choice: Choice, run: Run) -> dict[Kind, dict[str, Any]]:
    """Return the planned values of both files that do not depend on the model or the cluster, by dotted key."""
    planned: dict[Kind, dict[str, Any]] = {"deepspeed": {}, "accelerate": {}}
    for row in SETTINGS.values():
        for key, value in row.values(choice, run).items():
            planned["deepspeed" if key in row.deepspeed else "accelerate"][key] = value
    return planned


def number_of_conflicts(own: UserFiles, choice: Choice, run: Run) -> int:
    """Return how many keys of the run's own files contradict ``choice``, as far as the model does not matter."""
    if "deepspeed" in own and not choice.is_deepspeed:
        return 1000  # the other library: every key
    planned = planned_values(choice, run)
    is_script = run.script is not None
    return sum(
        key in planned[kind] for kind, file in own.items() for key in contradictions(file, planned[kind], is_script)
    )


def check_choice(own: UserFiles, choice: Choice, run: Run) -> None:
    """Raise a `ConfigError` if the run's own files have a key that cannot be taken, or contradict ``choice``."""
    check_library(own, choice)
    check_own_files(own, planned_values(choice, run), run, is_complete=False)


def check_refused(own: UserFiles, run: Run) -> None:
    """Raise a `ConfigError` if the run's own files have a key that no plan can take."""
    check_own_files(own, {"deepspeed": {}, "accelerate": {}}, run, is_complete=False)


def describe_own_files(own: UserFiles, choice: Choice, run: Run) -> list[str]:
    """Return a line for each file: the keys that limit the choice, and those that the memory estimate counts."""
    planned = planned_values(choice, run)
    lines = []
    for file in own.values():
        values = {key: value for key, value in leaves(file.values) if value != "auto" and key in planned[file.kind]}
        limits = ", ".join(f"{key} {value!r}" for key, value in values.items())
        counted = ", ".join(f"{key} {value!r}" for key, value in estimated_values(file).items() if value != "auto")
        lines += [f"{file.name} limits the choice: {limits}"] if limits else []
        lines += [f"the memory estimate counts from {file.name}: {counted}"] if counted else []
    return lines


def check_library(own: UserFiles, choice: Choice) -> None:
    """Raise a `ConfigError` if the run has a DeepSpeed file and ``choice`` another library."""
    if "deepspeed" in own and not choice.is_deepspeed:
        raise ConfigError(
            f"deepspeed_config names {own['deepspeed'].name}, but strategy {choice.strategy} does not use DeepSpeed. "
            "Remove deepspeed_config, or set strategy to one of DeepSpeed's (zero1, zero2, zero3 ...)."
        )


def check_own_files(own: UserFiles, planned: Mapping[Kind, Planned], run: Run, *, is_complete: bool = True) -> None:
    """Raise a `ConfigError` that lists the keys of the user's files that do not fit.

    ``planned`` holds the planned values by kind of file. Unless it ``is_complete``, a planned key that is not in it is
    not compared.
    """
    lines = [line for kind, file in own.items() for line in _wrong_keys(file, planned[kind], run, is_complete)]
    if lines:
        raise ConfigError("\n".join([_TITLE, *lines, *_strategy_hint(own, planned), _ADVICE]))


_TITLE: Final = "Your own files contradict the run and its plan:"
_ADVICE: Final = (
    'Change the run to match, or remove these keys from your file (or write "auto" for a planned value in a DeepSpeed '
    "file)."
)


def _wrong_keys(file: UserFile, planned: Planned, run: Run, is_complete: bool) -> list[str]:
    """Return a line for each key, or section, of ``file`` that does not fit."""
    is_script, values = run.script is not None, dict(leaves(file.values))
    wrong = {}
    for key, rule in contradictions(file, planned, is_script).items():
        if key in planned:
            wrong[key] = f"{key}: {values[key]!r} in {file.name}, {planned[key]!r} in the plan. {rule.effect}"
        elif is_complete:
            effect = ACCELERATE_STOPS if key == "mixed_precision" else rule.effect
            wrong[key] = f"{key}: {values[key]!r} in {file.name}, not set in the plan. {effect}"
    refused = refusals(file, is_script)
    for _, keys in groupby(refused, _line_of):
        key, *others = keys
        more = f" and {plural(len(others), 'other key')} of this section" if others else ""
        wrong[key] = f"{key}: {values[key]!r}{more} in {file.name}. {refused[key]}"
    return [f"  {wrong[key]}" for key in values if key in wrong]


def _line_of(key: str) -> str:
    """Return what has a line of its own: optimizer and scheduler are refused as a whole."""
    section = key.partition(".")[0]
    return section if section in ("optimizer", "scheduler") else key


def _strategy_hint(own: UserFiles, planned: Mapping[Kind, Planned]) -> list[str]:
    """Return a line with the strategy that has the stage and the offload of the user's DeepSpeed file."""
    if "deepspeed" not in own:
        return []
    values, plan = dict(leaves(own["deepspeed"].values)), planned["deepspeed"]
    own_value = {key: value for key, value in values.items() if value != "auto"}
    has = [plan.get(key, values.get(key, "auto")) for key in _STAGE_AND_OFFLOAD]
    wanted = [own_value.get(key, value) for key, value in zip(_STAGE_AND_OFFLOAD, has, strict=True)]
    if all(map(same, wanted, has)):
        return []
    return [
        f"  The strategy with the stage and the offload of your file is {name}."
        for name, spec in STRATEGY_SPECS.items()
        if spec.is_deepspeed
        and not spec.hpz
        and [spec.zero_stage, spec.offload_optimizer or "none", spec.offload_param or "none"] == wanted
    ]
