"""Merge the user's own DeepSpeed or Accelerate file into the rendered ones.

`shardmake.config.user_file_keys` says what happens with each key. A file may set what the plan leaves open, and repeat
what the plan or the run decides, or leave it to "auto". Every other key is refused (`shardmake.run.own_files`). Every
value that is taken is reported, and stands in ``training.json``, from which the ranks, the receipt and the card have
it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardmake.config.models import Run
from shardmake.config.settings import SETTINGS
from shardmake.config.user_file_keys import judge
from shardmake.config.user_files import Kind, UserFile, UserFiles, read_user_files
from shardmake.core.nested import leaves, overlay, same
from shardmake.render.check import Files
from shardmake.run.own_files import Planned, check_library, check_own_files, planned_values
from shardmake.run.plan import Choice


def merge_own_files(files: Files, run: Run, choice: Choice) -> tuple[Files, list[str]]:
    """Return ``files`` with the additions of the run's own files, and a line for each value taken over or left out.

    Raises `ConfigError` with every key that contradicts the plan or that cannot be taken.
    """
    own = read_user_files(run)
    check_library(own, choice)
    planned = _planned(files, run, choice, own)
    check_own_files(own, planned, run)
    lines: list[str] = []
    changed: dict[str, Any] = {}
    merged: dict[str, Any] = {}
    for file in own.values():
        taken, noted, merged[file.kind] = _take(file, getattr(files, file.kind), planned[file.kind], run)
        changed |= taken
        lines += noted
    return replace(files, training=files.training.model_copy(update={"own_files": changed}), **merged), lines


def _planned(files: Files, run: Run, choice: Choice, own: UserFiles) -> dict[Kind, dict[str, Any]]:
    """Return the value of each key of both files that the user's may not change, with "auto" resolved."""
    values = planned_values(choice, run)
    deepspeed = dict(leaves(files.deepspeed)) | (values["deepspeed"] if choice.is_deepspeed else {})
    accelerate = values["accelerate"] | dict(leaves(files.accelerate))
    if len(own) == 2:  # the run itself names the file that accelerate would have read
        file = own["accelerate"].section("deepspeed_config").get("deepspeed_config_file")
        accelerate |= {"deepspeed_config.deepspeed_config_file": file} if file else {}
    return {"deepspeed": deepspeed, "accelerate": accelerate}


def _take(
    file: UserFile, rendered: Mapping[str, Any], planned: Planned, run: Run
) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """Return the values of ``file`` that change ``rendered``, a line for each, and ``rendered`` with them."""
    before, taken, changed, lines = dict(leaves(rendered)), {}, {}, []
    for one in judge(file, run.script is not None):
        key, value = one.key, one.value
        if one.rule.use == "planned":
            continue
        if one.is_idle or one.rule.use == "unused":
            why = f"{value!r} has no effect." if one.is_idle else one.rule.effect
            lines.append(f"{file.name}: {key} is left out. {why}")
            continue
        # Trainer or Accelerate fill in the keys that neither the plan nor the run has.
        rate = run.learning_rate or "auto" if key in SETTINGS["learning rate"].unplanned else "auto"
        filled = planned.get(key, rate) if value == "auto" else value
        taken[key] = filled
        if not (key in before and same(before[key], filled)):
            instead = f" instead of {before[key]!r}" if key in before else ""
            lines.append(f"{file.name}: {key} is {filled!r}{instead}. {one.rule.effect}")
            changed[key] = filled
    return changed, lines, overlay(rendered, taken)
