"""Find the model that is meant among several in one checkpoint, and its names among the other states of a training."""

import re
from collections.abc import Collection, Hashable, Mapping
from pathlib import Path
from typing import TypeVar

from shardmake.checkpoint.formats.contents import is_extra_state
from shardmake.core.errors import CheckpointError

_MODEL = "model"
NO_WEIGHTS = re.compile(r"optim.*|lr_.*|schedulers?|train_state|dataloader.*|loops|callbacks|.*rng.*")
"""Levels beside the weights in checkpoints of torchtitan, Lightning and users' own loops."""
Levels = tuple[str, ...]
_Model = TypeVar("_Model")
_Id = TypeVar("_Id", bound=Hashable)


def choose(models: Mapping[str, _Model], key: str | None, holder: Path) -> _Model:
    """Return the model at ``key``, without a key the only one; raise `CheckpointError` for none and for several."""
    chosen = [model for name, model in models.items() if key in (None, name)]
    names = ", ".join(sorted(filter(None, models)))
    if len(chosen) > 1:
        raise CheckpointError(
            f"{holder} holds several: {names}. Which one is meant is not recorded. Name one with --key."
        )
    if not chosen:
        raise CheckpointError(f"{holder} holds no model {key!r}. Leave out --key, or name one of: {names or 'none'}.")
    return chosen[0]


def names_of_model(
    paths: Mapping[_Id, Levels], tensors: Collection[_Id], key: str | None, holder: Path
) -> tuple[dict[_Id, str], tuple[str, ...]]:
    """Return the name of each of the model's tensors, by the checkpoint's name of it, and those of its extra states.

    Args:
        paths: The levels of all entries in the saved dictionary, by the checkpoint's name.
        tensors: The entries that are tensors.
        key, holder: As for `choose`; the key of a model is the levels above it, joined by dots.

    Raise `CheckpointError` if another entry of the model is not a tensor, or there is not one model that is meant.
    """
    names = {entry: ".".join(path) for entry, path in choose(_models(paths, tensors, key), key, holder).items()}
    others = sorted(name for entry, name in names.items() if entry not in tensors)
    if wrong := [name for name in others if not is_extra_state(name)]:
        raise CheckpointError(
            f"Cannot merge {holder}. {wrong[0]} in it is not a tensor, and safetensors files hold tensors only. Name "
            "another file or folder."
        )
    return {entry: name for entry, name in names.items() if entry in tensors}, tuple(others)


def _models(paths: Mapping[_Id, Levels], tensors: Collection[_Id], key: str | None) -> dict[str, dict[_Id, Levels]]:
    """Return the paths of each model's entries by its key: the levels above them, joined by dots.

    If there is a level ``model``, the model is below that level. Otherwise it is the whole dictionary without
    optimizer, scheduler, the like, and values such as a step; a single level that holds everything else is its key.
    Any levels that ``key`` names hold a model.
    """
    found: dict[str, dict[_Id, Levels]] = {}
    levels: dict[str, dict[_Id, Levels]] = {}
    rest: dict[_Id, Levels] = {}
    for entry, path in paths.items():
        level = path[:2].index(_MODEL) + 1 if _MODEL in path[:2] else 0
        if level and len(path) > level:
            found.setdefault(".".join(path[:level]), {})[entry] = path[level:]
        if not (len(path) > 1 and NO_WEIGHTS.fullmatch(path[0])) and (entry in tensors or is_extra_state(path[-1])):
            rest[entry] = path
            if len(path) > 1 and _MODEL not in path[:2]:
                levels.setdefault(path[0], {})[entry] = path[1:]
    if key and key not in found:
        named = tuple(key.split("."))
        found[key] = {entry: path[len(named) :] for entry, path in rest.items() if named == path[: len(named)] != path}
        return {name: held for name, held in (found | levels).items() if held}
    if not found:
        is_nested = sum(map(len, levels.values())) == len(rest)
        several = is_nested and len(levels) > 1 and any(_is_same_model(held, levels) for held in levels.values())
        return levels if several or (is_nested and len(levels) == 1) else {"": rest}
    return found | {name: held for name, held in levels.items() if _is_same_model(held, found)}


def _is_same_model(held: dict[_Id, Levels], models: Mapping[str, dict[_Id, Levels]]) -> bool:
    """Return True if one of the other ``models`` has a tensor of the same name, as a copy of averages has."""
    names = set(held.values())
    return any(names & set(other.values()) for other in models.values() if other is not held)
