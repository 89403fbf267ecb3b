"""The registry of checkpoint formats, and how to find and read the checkpoint that a path names."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardmake.checkpoint.formats import dcp, fsdp_per_rank, huggingface, lora, single_file, universal, zero
from shardmake.checkpoint.formats.contents import Contents
from shardmake.checkpoint.formats.dtypes import Target
from shardmake.core.errors import CheckpointError, ConfigError, ShardmakeError
from shardmake.run.paths import RunDir

_NUMBERED = re.compile(r"(?:checkpoint[-_]|step-|epoch[-_]|global_step_|epoch=\d+-step=)(\d+)(?:\.ckpt)?")
_STEP = re.compile(r"(?:checkpoint-|step-|epoch=\d+-step=)(\d+)(?:\.ckpt)?")
"""Names of checkpoints. The number in Accelerate's ``checkpoint_N`` is not a step."""

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}
"""Levels of names that torch.compile, activation checkpointing, FSDP1 and Lightning add."""
_MOST_LEVELS = 3
"""Levels that a program's own modules may add above the model."""


@dataclass(frozen=True)
class Layout:
    """A layout of checkpoints.

    Attributes:
        name: What writes it.
        sign: The files that show it.
        recognise: Returns what to read if a path is such a checkpoint, otherwise None.
        read: Reads it for a merged model of the given type; of several models, the one at a key. None: it is refused.
        instead: What to do with a layout that is refused.
        has_keys: A checkpoint may hold several models.
    """

    name: str
    sign: str
    recognise: Callable[[Path], Path | None]
    read: Callable[[Path, Target, str | None], Contents] | None = None
    instead: str = ""
    has_keys: bool = False


def _holds(*patterns: str) -> Callable[[Path], Path | None]:
    """Return a function that returns a folder if it holds a file that matches one of the ``patterns``."""
    return lambda path: path if path.is_dir() and any(any(path.glob(pattern)) for pattern in patterns) else None


def _without_key(read: Callable[[Path, Target], Contents]) -> Callable[[Path, Target, str | None], Contents]:
    return lambda path, target, _: read(path, target)


_MEGATRON = ("iter_*/common.pt", "iter_*/mp_rank_*/*.pt", "common.pt", "mp_rank_*/model_optim_rng.pt")
_MODEL_FILES = (huggingface.MODEL.single, huggingface.MODEL_BIN.single)
LAYOUTS: list[Layout] = [
    Layout("Megatron-core", _MEGATRON[0], _holds(*_MEGATRON), instead="Export it with Megatron Bridge's export_ckpt."),
    Layout(
        "Meta's Llama", "consolidated.00.pth", _holds("consolidated.*.pth"),
        instead="Convert it with transformers' convert_llama_weights_to_hf.py.",
    ),
    Layout(
        "several models (accelerator.save_state)", "model_1.safetensors", _holds("model_1.*", "pytorch_model_1.bin"),
        instead="Name the file of one of them.",
    ),
    Layout("DeepSpeed universal", "zero/*/fp32.pt", universal.recognise, _without_key(universal.read)),
    Layout("DeepSpeed", "global_step*, *_states.pt", zero.recognise, _without_key(zero.read)),
    Layout("DCP", ".metadata, *.distcp", dcp.recognise, dcp.read, has_keys=True),
    Layout("ranks", " or ".join(fsdp_per_rank.NAMES), fsdp_per_rank.recognise, _without_key(fsdp_per_rank.read)),
    Layout("PEFT", "adapter_model.*", huggingface.recognise_adapter, huggingface.read_adapter, has_keys=True),
    Layout("Hugging Face", ", ".join(_MODEL_FILES), huggingface.recognise, _without_key(huggingface.read)),
    Layout("shards", "*-00001-of-N.safetensors", single_file.recognise_shards, _without_key(single_file.read_shards)),
    Layout("one file", "a single *.pt, *.pth, *.ckpt, *.bin", single_file.recognise, single_file.read, has_keys=True),
]  # fmt: skip
"""Every layout, in the order in which they are tried; the last one only if a folder has no numbered checkpoints."""


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
    held = base if base is not None and huggingface.recognise(base) else None
    if not lora.is_adapter(contents):
        return contents if held is None else _without_outer(contents, huggingface.weight_names(held))
    return lora.merge(contents, huggingface.read(held) if held else None, lambda: layout(held) if held else {})


def _without_wrapper(contents: Contents) -> Contents:
    """Return the same tensors without the levels that DDP, torch.compile, checkpointing and FSDP1 add to names."""
    everywhere = contents.tensors and all(name.startswith("module.") for name in contents.tensors)
    outer = {name.partition(lora.PREFIX)[0] for name in contents.tensors} if _is_peft(contents) else {""}
    if not everywhere and not any(_WRAPPERS & set(name.split(".")) for name in contents.tensors) and outer == {""}:
        return contents

    def inner(name: str) -> str:
        levels = name.removeprefix("module.").split(".") if everywhere else name.split(".")
        plain = ".".join(level for level in levels if level not in _WRAPPERS)
        return plain[plain.find(lora.PREFIX) :] if len(outer) == 1 and lora.PREFIX in plain else plain

    return _renamed(contents, inner)


def _is_peft(contents: Contents) -> bool:
    return bool(contents.tensors) and all(lora.PREFIX in name for name in contents.tensors)


def _without_outer(contents: Contents, names: Collection[str]) -> Contents:
    """Return the same tensors without the levels above the model, if all have them and the ``names`` do not."""
    found = contents
    for _ in range(_MOST_LEVELS):
        if any(name in names for name in found.tensors):
            return found
        if len({name.partition(".")[0] for name in found.tensors}) != 1:
            break
        found = _renamed(found, lambda name: name.partition(".")[2])
    return contents


def _renamed(contents: Contents, inner: Callable[[str], str]) -> Contents:
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
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Name a run, a checkpoint, or the folder with its files.")
    candidates = _checkpoints(path)
    found = _read(path, target, key, LAYOUTS[:-1] if candidates else LAYOUTS)
    return found or _read_newest(path, candidates, target, key)


def _read(path: Path, target: Target, key: str | None, layouts: Sequence[Layout] = LAYOUTS) -> Contents | None:
    """Read the checkpoint that ``path`` itself is; return None if it is not one."""
    try:
        for layout in layouts:
            found = layout.recognise(path) if path.is_dir() or layout is LAYOUTS[-1] else None
            if found is None:
                continue
            if layout.read is None:
                raise CheckpointError(f"{path} is a checkpoint of {layout.name}, which is not read. {layout.instead}")
            if key is not None and not layout.has_keys:
                names = ", ".join(known.name for known in LAYOUTS if known.has_keys)
                raise ConfigError(
                    f"Cannot look for {key!r} in {found}. Only checkpoints of these layouts have keys: {names}. Leave "
                    "out --key."
                )
            contents = layout.read(found, target, key)
            return contents if contents.step is not None else replace(contents, step=_step_in_name(found))
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
    signs = "; ".join(f"{layout.name} ({layout.sign})" for layout in LAYOUTS)
    raise CheckpointError(
        f"{path} holds no checkpoint: no checkpoint-*, checkpoint_*, step-*, epoch_* or *.ckpt, and none of the "
        f"layouts {signs}. Name a run, a checkpoint, or the folder with its files."
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
