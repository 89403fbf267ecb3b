"""Weights in one file of any name, perhaps beside optimizer states, and shards of other names than Hugging Face's.

Accelerate's FULL_STATE_DICT, Lightning's ``.ckpt`` files and users' own loops write one file; torchtune writes shards.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats import huggingface, unpickle
from shardmake.checkpoint.formats.contents import Contents, is_extra_state, unsharded
from shardmake.checkpoint.formats.dcp import NO_WEIGHTS
from shardmake.checkpoint.formats.dtypes import Target
from shardmake.checkpoint.formats.unpickle import TensorRef
from shardmake.core.errors import CheckpointError

_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
_OTHER = re.compile(
    r"(optim|sched|scaler|sampler|rng_|random_states|training_args|recipe_state|dataloader|custom_checkpoint).*"
)
"""Names of files with other states of a training."""
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.(safetensors|bin)")


def recognise(path: Path) -> Path | None:
    """Return ``path`` if it is a file of weights, or the only one in the folder ``path``."""
    if path.is_file():
        return path if path.suffix in _SUFFIXES else None
    names = sorted(it.name for it in path.iterdir() if it.suffix in _SUFFIXES and it.is_file())
    found = [name for name in names if not _OTHER.match(name)]
    if len(found) > 1:
        raise CheckpointError(
            f"{path} holds several files of weights ({', '.join(found)}), and which of them is the model is not "
            f"recorded. Name one: {path / found[0]}"
        )
    return path / found[0] if found else None


def read(file: Path, target: Target = "keep", key: str | None = None) -> Contents:
    """Read the model in ``file``; of several, the one at ``key``.

    Raises:
        CheckpointError: The file is damaged, or holds no model, or several of them and no ``key`` names one.
    """
    if file.suffix == ".safetensors":
        return Contents("one file", file.parent, None, 1, {held.name: held for held in huggingface.read_file(file)})
    state = unpickle.load(file)
    models = _models(state) if isinstance(state, Mapping) else {}
    chosen = [model for name, model in models.items() if key in (None, name)]
    if len(chosen) != 1:
        held = f"models {', '.join(models)}. Name one with --key" if models else "no tensors by name. Name another file"
        raise CheckpointError(f"{file} holds {held}.")
    tensors = {name: unsharded(name, ref) for name, ref in chosen[0].items() if isinstance(ref, TensorRef)}
    return Contents("one file", file.parent, None, 1, tensors)


def _models(state: Mapping[Any, Any]) -> dict[str, Mapping[str, TensorRef]]:
    """Return the dictionaries that hold tensors and extra states only, by their key; "model" for the whole file."""
    if _is_model(state):
        return {"model": state}
    held = ((str(key), value) for key, value in state.items() if not NO_WEIGHTS.fullmatch(str(key)))
    return {key: value for key, value in held if isinstance(value, Mapping) and _is_model(value)}


def _is_model(value: Mapping[Any, Any]) -> bool:
    return any(isinstance(v, TensorRef) for v in value.values()) and all(
        isinstance(k, str) and (isinstance(v, TensorRef) or is_extra_state(k)) for k, v in value.items()
    )


def recognise_shards(path: Path) -> Path | None:
    """Return ``path`` if it holds shards."""
    return path if any(_SHARD.fullmatch(it.name) for it in path.iterdir()) else None


def read_shards(folder: Path, target: Target = "keep") -> Contents:
    """Read all shards in ``folder``.

    Raises:
        CheckpointError: A shard is missing or damaged, or there are several sets of them.
    """
    found = {it: match for it in sorted(folder.iterdir()) if (match := _SHARD.fullmatch(it.name))}
    sets = {(match["stem"], int(match["count"])) for match in found.values()}
    numbers = {match["number"] for match in found.values()}
    if len(sets) > 1 or not len(found) == len(numbers) == next(iter(sets))[1]:
        expected = " and ".join(f"{stem} of {count}" for stem, count in sorted(sets))
        raise CheckpointError(
            f"{folder} holds {len(found)} shards of {expected}, not those of one model. Copy it again."
        )
    return Contents("shards", folder, None, 1, {t.name: t for path in found for t in huggingface.read_file(path)})
