"""The registry of checkpoint formats, and how to find and read the checkpoint that a path names."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from shardmake.checkpoint.formats import dcp, fsdp_per_rank, huggingface, lora, universal, zero
from shardmake.checkpoint.formats.contents import Contents
from shardmake.checkpoint.formats.dtypes import Target
from shardmake.core.errors import CheckpointError, ConfigError, ShardmakeError
from shardmake.run.paths import RunDir

_NUMBERED = re.compile(r"(?:checkpoint[-_]|step-)(\d+)")
_STEP = re.compile(r"(?:checkpoint-|step-)(\d+)")
"""Names of checkpoints. The number in Accelerate's ``checkpoint_N`` is not a step."""

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Levels of names that torch.compile, activation checkpointing and FSDP1 add."""

FORMATS: list[tuple[Callable[[Path], Path | None], Callable[[Path, Target], Contents]]] = [
    (universal.recognise, universal.read),
    (zero.recognise, zero.read),
    (dcp.recognise, dcp.read),
    (fsdp_per_rank.recognise, fsdp_per_rank.read),
    (huggingface.recognise_adapter, huggingface.read_adapter),
    (huggingface.recognise, huggingface.read),
]
"""Every format, in the order in which they are tried, as two functions.

The first returns the folder to read if a path is a checkpoint of this format, otherwise None. The second reads that
folder for a merged model of the given type.
"""


def read_model(
    path: Path,
    target: Target = "keep",
    base: Path | None = None,
    adapter: bool = False,
    key: str | None = None,
    layout: Callable[[Path], Mapping[str, str]] = lambda _: {},
) -> Contents:
    """Read the checkpoint at ``path`` as `read_checkpoint` does; add an adapter to its base model.

    Levels that a wrapper adds to names are removed: ``module.`` at the start of all names, and `_WRAPPERS` anywhere.

    Args:
        path: A run, a checkpoint, or the folder with its files.
        target: Type of the merged model.
        base: The base model's folder, for an adapter.
        adapter: Return the adapter alone.
        key: The levels above one of several models in a DCP checkpoint, joined by dots.
        layout: Returns the names in a model's folder by the names of its class, where they differ.
    """
    contents = _without_wrapper(read_checkpoint(path, target, key))
    if adapter:
        return lora.adapter_only(contents)
    if not lora.is_adapter(contents):
        return contents
    base_weights = huggingface.read(base) if base is not None and huggingface.recognise(base) else None
    return lora.merge(contents, base_weights, lambda: {} if base is None else layout(base))


def _without_wrapper(contents: Contents) -> Contents:
    """Return the same tensors without the levels that DDP, torch.compile, checkpointing and FSDP1 add to names."""
    everywhere = contents.tensors and all(name.startswith("module.") for name in contents.tensors)
    if not everywhere and not any(_WRAPPERS & set(name.split(".")) for name in contents.tensors):
        return contents

    def inner(name: str) -> str:
        levels = name.removeprefix("module.").split(".") if everywhere else name.split(".")
        return ".".join(level for level in levels if level not in _WRAPPERS)

    originals: dict[str, str] = {}
    for name in contents.tensors:
        if inner(name) in originals:
            raise CheckpointError(
                f"Cannot read {contents.folder}. {originals[inner(name)]} and {name} are one name without the levels "
                "of wrappers. Save the model without its wrapper."
            )
        originals[inner(name)] = name
    tensors = [replace(tensor, name=inner(name)) for name, tensor in contents.tensors.items()]
    return contents.with_tensors(tensors, {inner(a): inner(b) for a, b in contents.aliases.items()})


def read_checkpoint(path: Path, target: Target = "keep", key: str | None = None) -> Contents:
    """Read the checkpoint at ``path``; of several checkpoints in a folder, read the newest readable one.

    Of several models in a DCP checkpoint, read the one at ``key``.

    Raises:
        CheckpointError: The folder holds no checkpoint, or none is readable; the message gives each reason.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder. Name a run, a checkpoint, or the folder with its files.")
    return _read(path, target, key) or _read_newest(path, _checkpoints(path), target, key)


def _read(path: Path, target: Target, key: str | None) -> Contents | None:
    """Read the checkpoint that ``path`` itself is; return None if it is not one."""
    try:
        for recognise, read in FORMATS:
            folder = recognise(path)
            if folder is not None:
                if key is not None and read is not dcp.read:
                    raise ConfigError(
                        f"Cannot look for {key!r} in {folder}. Only checkpoints of DCP have keys. Leave out --key."
                    )
                contents = read(folder, target) if key is None else dcp.read(folder, target, key)
                return contents if contents.step is not None else replace(contents, step=_step_in_name(folder))
    except (ShardmakeError, OSError):
        raise
    except Exception as error:  # a damaged file can hold any value in the place of any other
        raise CheckpointError(
            f"Cannot read the checkpoint {path}. A file has unexpected content ({type(error).__name__}: {error}). It "
            "is damaged, or written by another version. Use an older checkpoint, or copy this one again."
        ) from error
    return None


def _read_newest(path: Path, candidates: list[Path], target: Target, key: str | None) -> Contents:
    reasons: list[str] = []
    for candidate in candidates:
        try:
            contents = _read(candidate, target, key)
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        if contents is not None:
            return replace(contents, notes=tuple(reasons))
        reasons.append(f"{candidate} holds no weights.")
    if reasons:
        raise CheckpointError("\n".join([f"No checkpoint in {path} can be merged:", *reasons]))
    raise CheckpointError(
        f"{path} holds no checkpoint: no global_step*, no *_states.pt, no .metadata, no model.safetensors, "
        "no checkpoint-*, checkpoint_* or step-*. Name a run, a checkpoint, or the folder with its files."
    )


def _checkpoints(path: Path) -> list[Path]:
    """Return the numbered folders in ``path``, or where a run, Accelerate or torchtitan puts them, newest first."""
    for folder in (path, RunDir(path).checkpoints, path / "checkpoints", path / "checkpoint"):
        entries = list(folder.iterdir()) if folder.is_dir() else []
        found = [(int(match[1]), entry) for entry in entries if (match := _NUMBERED.fullmatch(entry.name))]
        if found:
            return [entry for _, entry in sorted(found, reverse=True) if entry.is_dir()]
    return []


def _step_in_name(path: Path) -> int | None:
    """Return the step in the name of the folder or its parent, for formats whose files do not record it."""
    found = [match for name in (path.name, path.parent.name) if (match := _STEP.fullmatch(name))]
    return int(found[0][1]) if found else None
