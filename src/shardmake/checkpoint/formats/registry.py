"""Find the checkpoint that is meant: in a run's folder, a checkpoint's, or DeepSpeed's or FSDP's inner one."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shardmake.checkpoint.formats import dcp, fsdp_per_rank, huggingface, lora, zero
from shardmake.checkpoint.formats.contents import Contents
from shardmake.checkpoint.formats.dtypes import Target
from shardmake.core.errors import ShardmakeError
from shardmake.run.paths import RunDir

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_FSDP_FOLDER = "pytorch_model_fsdp_0"  # Accelerate's name for the first (and here only) model
Reader = Callable[[], Contents]


def read_model(path: Path, target: Target = "keep", base: Path | None = None, adapter: bool = False) -> Contents:
    """`read_checkpoint`, and where that is a LoRA adapter, the base model with the adapter added to it.

    With ``adapter``, the adapter alone. Names that a wrapper of the model has put before all others (``module.``,
    ``_orig_mod.``) are taken off.
    """
    contents = _unwrapped(read_checkpoint(path, target))
    if adapter:
        return lora.alone(contents)
    if not lora.is_adapter(contents):
        return contents
    base_weights = huggingface.read(base) if base is not None and huggingface.recognises(base) else None
    return lora.merge(contents, base_weights)


def _unwrapped(contents: Contents) -> Contents:
    for prefix in ("module.", "_orig_mod."):
        if contents.tensors and all(name.startswith(prefix) for name in contents.tensors):
            tensors = [replace(tensor, name=name.removeprefix(prefix)) for name, tensor in contents.tensors.items()]
            aliases = {a.removeprefix(prefix): b.removeprefix(prefix) for a, b in contents.aliases.items()}
            return contents.with_tensors(tensors, aliases)
    return contents


def read_checkpoint(path: Path, target: Target = "keep") -> Contents:
    """The checkpoint at ``path``, whichever way it is pointed at, read but for its tensors.

    In a folder of several checkpoints the newest one that can be read is taken.

    Raises:
        ShardmakeError: there is none, or none can be read; the message says why of each.
    """
    if not path.is_dir():
        raise ShardmakeError(f"{path} is no folder. Name a run, a checkpoint, or the folder with its files.")
    reader = _reader(path, target)
    if reader is not None:
        return reader()
    return _newest(path, _checkpoints(path), target)


def _newest(path: Path, candidates: list[Path], target: Target) -> Contents:
    reasons: list[str] = []
    for candidate in candidates:
        reader = _reader(candidate, target)
        try:
            if reader is not None:
                return replace(reader(), notes=tuple(reasons))
            reasons.append(f"{candidate} holds no weights.")
        except ShardmakeError as error:
            reasons.append(str(error))
    if reasons:
        raise ShardmakeError("\n".join([f"No checkpoint in {path} can be merged:", *reasons]))
    raise ShardmakeError(
        f"{path} holds no checkpoint: no global_step*, no *_states.pt, no .metadata, no model.safetensors, "
        "no checkpoint-*. Name a run, a checkpoint, or the folder with its files."
    )


def _checkpoints(path: Path) -> list[Path]:
    """Folders ``checkpoint-N`` in ``path`` or in the run's ``train/checkpoints``, the newest first."""
    for parent in (path, RunDir(path).checkpoints):
        found = {int(match[1]): entry for entry in _folders(parent) if (match := _CHECKPOINT.fullmatch(entry.name))}
        if found:
            return [found[step] for step in sorted(found, reverse=True)]
    return []


def _folders(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if entry.is_dir()] if path.is_dir() else []


def _reader(path: Path, target: Target) -> Reader | None:
    """How to read the one checkpoint that ``path`` is; None if it is none itself."""
    if zero.recognises_universal(path):
        return lambda: zero.read_universal(path)
    if zero.recognises(path):
        return lambda: zero.read(path, target)
    inner = _deepspeed_tag(path)
    if inner is not None:
        return lambda: zero.read(inner, target)
    for sharded in (path, path / _FSDP_FOLDER):
        if dcp.recognises(sharded):
            return lambda: replace(dcp.read(sharded), step=_step(sharded))
    if fsdp_per_rank.recognises(path):
        return lambda: replace(fsdp_per_rank.read(path), step=_step(path))
    if huggingface.recognises_adapter(path):
        return lambda: replace(huggingface.read_adapter(path), step=_step(path))
    if huggingface.recognises(path):
        return lambda: replace(huggingface.read(path), step=_step(path))
    return None


def _step(path: Path) -> int | None:
    """The step in the name of the folder or of the one above, where the checkpoint's files do not say it."""
    found = [match for name in (path.name, path.parent.name) if (match := _CHECKPOINT.fullmatch(name))]
    return int(found[0][1]) if found else None


def _deepspeed_tag(path: Path) -> Path | None:
    """DeepSpeed's inner folder: the one that ``latest`` names, or the only one that there is."""
    latest = path / "latest"
    if latest.is_file():
        tag = path / latest.read_text().strip()
        if not tag.is_dir() or not zero.recognises(tag):
            raise ShardmakeError(
                f"{latest} names {tag.name}, which is no complete checkpoint. Take an older checkpoint."
            )
        return tag
    tags = [entry for entry in _folders(path) if zero.recognises(entry)]
    if len(tags) > 1:
        names = ", ".join(sorted(tag.name for tag in tags))
        raise ShardmakeError(f"{path} holds several checkpoints ({names}) and no file 'latest'. Name one of them.")
    return tags[0] if tags else None
