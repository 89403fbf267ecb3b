"""The registry of checkpoint formats, and how to find and read the checkpoint that a path names."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardmake.checkpoint.formats import dcp, huggingface, lora, zero
from shardmake.checkpoint.formats.contents import Contents
from shardmake.checkpoint.formats.dtypes import Target
from shardmake.checkpoint.formats.hub_layout import HubLayout
from shardmake.checkpoint.formats.models import choose
from shardmake.core.errors import CheckpointError, ShardmakeError

_NUMBERED = re.compile(
    r"(?:(?:checkpoint-|step-|global_step_|epoch=\d+-step=)(?P<step>\d+)|(?:checkpoint_|epoch[-_])(\d+))(?:\.ckpt)?"
)
"""Names of checkpoints. The number in Accelerate's ``checkpoint_N`` is not a step."""

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}
"""Levels of names that torch.compile, activation checkpointing, FSDP1 and Lightning add."""
_MOST_LEVELS = 3
"""Levels that a program's own modules may add above the model."""


Reader = Callable[[Path, Target, str | None], Contents]
Finder = Callable[[Path], Mapping[str, Path]]


@dataclass(frozen=True)
class Layout:
    """A layout of checkpoints.

    Attributes:
        name: What writes it.
        sign: The files that show it.
        find: Returns what to read for each model that a path holds, by key; empty for another path.
        read: Reads it for a merged model of the given type; of several models in it, the one at a key. None: refused.
        instead: What to do with a layout that is refused.
    """

    name: str
    sign: str
    find: Finder
    read: Reader | None = None
    instead: str = ""


def _holds(*patterns: str) -> Finder:
    """Return a function that finds the only model in a folder with a file that matches one of the ``patterns``."""
    return lambda path: {"": path} if any(any(path.glob(pattern)) for pattern in patterns) else {}


def _whole(read: Callable[[Path, Target], Contents]) -> Reader:
    return lambda place, target, key: choose({"": read}, key, place)(place, target)


_MEGATRON = ("iter_*/common.pt", "iter_*/mp_rank_*/*.pt", "common.pt", "mp_rank_*/model_optim_rng.pt")
_OF_RANKS = "shard-00002-model-*.safetensors"
_KINDS = (huggingface.MODEL, huggingface.MODEL_BIN)
_MODEL_FILES = [*(kind.single for kind in _KINDS), *(kind.index for kind in _KINDS)]
LAYOUTS: list[Layout] = [
    Layout("Megatron-core", _MEGATRON[0], _holds(*_MEGATRON), instead="Export it with Megatron Bridge's export_ckpt."),
    Layout(
        "Meta's Llama", "consolidated.00.pth", _holds("consolidated.*.pth"),
        instead="Convert it with transformers' convert_llama_weights_to_hf.py.",
    ),
    Layout("Accelerate's several models", "model_1.safetensors", huggingface.find_several, huggingface.read_one),
    Layout("DeepSpeed universal", "zero/*/fp32.pt", _holds("zero/*/fp32.pt"), _whole(zero.read_universal)),
    Layout("DeepSpeed", "global_step*, *_states.pt", zero.find, _whole(zero.read)),
    Layout("DCP", ".metadata, *.distcp", dcp.find, dcp.read),
    Layout("ranks", " or ".join(dcp.RANK_FILES), dcp.find_ranks, dcp.read_ranks),
    Layout("PEFT", "adapter_model.*", huggingface.find_adapters, _whole(huggingface.read_adapter)),
    Layout("Hugging Face", ", ".join(_MODEL_FILES[:2]), _holds(*_MODEL_FILES), _whole(huggingface.read)),
    Layout(
        "torch's HuggingFaceStorageWriter", _OF_RANKS, _holds(_OF_RANKS),
        instead="Save with enable_consolidation=True, or load with HuggingFaceStorageReader and save with dcp.save.",
    ),
    Layout("shards", "*-00001-of-N.safetensors", huggingface.find_shards, _whole(huggingface.read_shards)),
    Layout("PEFT by name", "NAME/adapter_model.*", huggingface.find_named_adapters, _whole(huggingface.read_adapter)),
    Layout("one file", "a single *.pt, *.pth, *.ckpt, *.bin", huggingface.find_files, huggingface.read_one),
]  # fmt: skip
"""Every layout, in the order in which they are tried; the last two only if a folder has no numbered checkpoints."""


def read_model(
    path: Path,
    target: Target = "keep",
    base: Path | None = None,
    adapter: bool = False,
    key: str | None = None,
    layout: Callable[[Path], HubLayout] = lambda _: HubLayout(),
    like: Path | None = None,
) -> Contents:
    """Read the checkpoint at ``path`` as `read_checkpoint` does; add an adapter to its base model.

    Levels that a wrapper adds to names are removed: ``module.`` at the start of all names, and `_WRAPPERS` anywhere.

    Args:
        path, target, key: As for `read_checkpoint`.
        base: The base model's folder, for an adapter; ``layout`` returns the layout of its files.
        adapter: Return the adapter alone.
        like: A model's folder with the names that those of a whole model get; by default that of the base model.
    """
    contents = _without_wrapper(read_checkpoint(path, target, key))
    if target != "keep" and lora.is_adapter(contents):  # the product of rounded factors is another one
        contents = _without_wrapper(read_checkpoint(path, "keep", key))
    if adapter:
        return lora.adapter_only(contents)
    held = base if base is not None and huggingface.recognise(base) else None
    if not lora.is_adapter(contents):
        named = like or held
        return contents if named is None else _without_outer(contents, huggingface.weight_names(named))
    return lora.merge(contents, huggingface.read(held) if held else None, lambda: layout(held) if held else HubLayout())


def _without_wrapper(contents: Contents) -> Contents:
    """Return the same tensors without the levels that DDP, torch.compile, checkpointing and FSDP1 add to names."""
    everywhere = contents.tensors and all(name.startswith("module.") for name in contents.tensors)
    is_peft = bool(contents.tensors) and all(lora.PREFIX in name for name in contents.tensors)
    outer = {name.partition(lora.PREFIX)[0] for name in contents.tensors} if is_peft else {""}
    if not everywhere and not any(_WRAPPERS & set(name.split(".")) for name in contents.tensors) and outer == {""}:
        return contents

    def inner(name: str) -> str:
        levels = name.removeprefix("module.").split(".") if everywhere else name.split(".")
        plain = ".".join(level for level in levels if level not in _WRAPPERS)
        return plain[plain.find(lora.PREFIX) :] if len(outer) == 1 and lora.PREFIX in plain else plain

    return _renamed(contents, inner)


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
        if (other := originals.setdefault(inner(name), name)) != name:
            raise CheckpointError(
                f"Cannot read {contents.folder}. {other} and {name} are one name without the levels of wrappers. Save "
                "the model without its wrapper."
            )
    tensors = [replace(contents.tensors[original], name=name) for name, original in originals.items()]
    return contents.with_tensors(tensors, {inner(a): inner(b) for a, b in contents.aliases.items()})


def read_checkpoint(path: Path, target: Target = "keep", key: str | None = None) -> Contents:
    """Read the checkpoint at ``path``; of several checkpoints in a folder, read the newest readable one.

    Of several models in it, read the one at ``key``: its file or folder, or the levels above its weights. Raise
    `CheckpointError` if the folder holds no checkpoint, or none is readable; the message gives each reason.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Name a run, a checkpoint, or the folder with its files.")
    candidates, reasons = _checkpoints(path), list[str]()
    if (found := _read(path, target, key, LAYOUTS[:-2] if candidates else LAYOUTS)) is not None:
        return found
    for candidate in candidates:
        try:
            if (found := _read(candidate, target, key)) is not None:
                return replace(found, notes=tuple(reasons))
            reasons.append(f"{candidate} holds no weights.")
        except CheckpointError as error:
            reasons.append(str(error))
    if reasons:
        raise CheckpointError("\n".join([f"No checkpoint in {path} can be merged:", *reasons]))
    signs = "; ".join(f"{layout.name} ({layout.sign})" for layout in LAYOUTS)
    raise CheckpointError(
        f"{path} holds no checkpoint: no checkpoint-*, checkpoint_*, step-*, epoch_* or *.ckpt, and none of the "
        f"layouts {signs}. Name a run, a checkpoint, or the folder with its files."
    )


def _read(path: Path, target: Target, key: str | None, layouts: Sequence[Layout] = LAYOUTS) -> Contents | None:
    """Read the checkpoint that ``path`` itself is; return None if it is not one."""
    try:
        for layout in layouts if path.is_dir() else LAYOUTS[-1:]:
            places = layout.find(path)
            if places and layout.read is None:
                raise CheckpointError(f"{path} is a checkpoint of {layout.name}, which is not read. {layout.instead}")
            if places and layout.read is not None:
                is_outer = key in places or len(places) > 1
                place = choose(places, key if is_outer else None, path)
                contents = layout.read(place, target, None if is_outer else key)
                return contents if contents.step is not None else replace(contents, step=_step_in_name(place))
    except (ShardmakeError, OSError):
        raise
    except Exception as error:  # a damaged file can hold any value in the place of any other
        raise CheckpointError(
            f"Cannot read the checkpoint {path}. A file has unexpected content ({type(error).__name__}: {error}). It "
            "is damaged, or written by another version. Use an older checkpoint, or copy this one again."
        ) from error
    return None


def _checkpoints(path: Path) -> list[Path]:
    """Return the numbered folders in ``path``, or where a run, Accelerate or torchtitan puts them, newest first."""
    for folder in (path, path / "train" / "checkpoints", path / "checkpoints", path / "checkpoint"):
        entries = list(folder.iterdir()) if folder.is_dir() else []
        found = [(int(match[1] or match[2]), entry) for entry in entries if (match := _NUMBERED.fullmatch(entry.name))]
        if found:
            return [entry for _, entry in sorted(found, reverse=True) if entry.is_dir()]
    return []


def _step_in_name(path: Path) -> int | None:
    """Return the step in the name of the folder or its parent, for formats whose files do not record it."""
    found = (match["step"] for name in (path.name, path.parent.name) if (match := _NUMBERED.fullmatch(name)))
    return next((int(step) for step in found if step), None)
