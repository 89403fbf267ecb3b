"""Weights in one file of any name, perhaps beside optimizer states, and shards of other names than Hugging Face's.

Accelerate's FULL_STATE_DICT, Lightning's ``.ckpt`` files and users' own loops write one file; torchtune writes shards.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats import huggingface, unpickle
from shardmake.checkpoint.formats.contents import Contents, unsharded
from shardmake.checkpoint.formats.dtypes import Target
from shardmake.checkpoint.formats.models import NO_WEIGHTS, Levels, names_of_model
from shardmake.checkpoint.formats.unpickle import TensorRef
from shardmake.core.errors import CheckpointError

_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
_OTHER = re.compile(
    r"(optim|sched|scaler|sampler|rng_|random_states|training_args|recipe_state|dataloader|custom_checkpoint).*"
)
"""Names of files with other states of a training."""
_NUMBERED = re.compile(r"(pytorch_)?model(?P<number>_\d+)?\.(safetensors|bin)")
_LEVELS = 3
"""A model is below the first or second level."""
_MOST_ENTRIES = 1 << 20
"""A dictionary may hold another one many times."""
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.(safetensors|bin)")


def find(path: Path) -> dict[str, Path]:
    """Return ``path`` if it is a file of weights, or all such files in the folder ``path``, by name."""
    if path.is_file():
        return {path.name: path} if path.suffix in _SUFFIXES else {}
    files = (it for it in sorted(path.iterdir()) if it.suffix in _SUFFIXES and it.is_file())
    return {it.name: it for it in files if not _OTHER.match(it.name)}


def find_several(path: Path) -> dict[str, Path]:
    """Return the files of the models that ``accelerator.save_state`` wrote, if they are several."""
    named = [(it, match) for it in sorted(path.iterdir()) if (match := _NUMBERED.fullmatch(it.name))]
    return {it.name: it for it, _ in named} if any(match["number"] for _, match in named) else {}


def read(file: Path, target: Target = "keep", key: str | None = None) -> Contents:
    """Read the model in ``file``; of several, the one at ``key``.

    Raises:
        CheckpointError: The file is damaged, or holds no model, or several of them and no ``key`` names one.
    """
    if file.suffix == ".safetensors":
        return Contents("one file", file.parent, None, 1, {held.name: held for held in huggingface.read_file(file)})
    state = unpickle.load(file)
    held = dict(islice(_entries(state, _LEVELS), _MOST_ENTRIES)) if isinstance(state, Mapping) else {}
    weights = {path for path, value in held.items() if isinstance(value, TensorRef)}
    names, left_out = names_of_model({path: path for path in held}, weights, key, file)
    if not names:
        raise CheckpointError(f"Cannot merge {file}. It holds no tensors by name. Name another file.")
    tensors = {name: unsharded(name, held[path]) for path, name in names.items()}
    return Contents("one file", file.parent, None, 1, tensors, left_out=left_out)


def _entries(state: Mapping[Any, Any], levels: int) -> Iterator[tuple[Levels, Any]]:
    """Yield the entries of a dictionary by the keys of up to ``levels`` levels, without other states of a training."""
    for key, value in state.items():
        if levels > 1 and isinstance(value, Mapping):
            if not NO_WEIGHTS.fullmatch(str(key)):
                yield from (((str(key), *path), held) for path, held in _entries(value, levels - 1))
        else:
            yield (str(key),), value


def find_shards(path: Path) -> Path | None:
    """Return ``path`` if it is a folder with a numbered shard."""
    return path if path.is_dir() and any(_SHARD.fullmatch(it.name) for it in path.iterdir()) else None


def read_shards(folder: Path, target: Target = "keep") -> Contents:
    """Read all shards in ``folder``.

    Raises:
        CheckpointError: A shard is missing or damaged, or there are several sets of them.
    """
    found = {it: match for it in sorted(folder.iterdir()) if (match := _SHARD.fullmatch(it.name))}
    sets = {(match["stem"], int(match["count"])) for match in found.values()}
    numbers = {match["number"] for match in found.values()}
    if len(sets) != 1 or not len(found) == len(numbers) == next(iter(sets))[1]:
        expected = " and ".join(f"{stem} of {count}" for stem, count in sorted(sets))
        raise CheckpointError(
            f"{folder} holds {len(found)} shards of {expected}, not those of one model. Copy it again."
        )
    return Contents("shards", folder, None, 1, {t.name: t for path in found for t in huggingface.read_file(path)})
