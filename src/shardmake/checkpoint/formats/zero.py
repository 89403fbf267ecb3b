"""Checkpoints of DeepSpeed: ZeRO-1, 2 and 3, in which `zero_tensors` finds each tensor, and universal ones."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats import unpickle
from shardmake.checkpoint.formats.contents import Contents, StoredTensor, unsharded
from shardmake.checkpoint.formats.dtypes import Target
from shardmake.checkpoint.formats.nvme_swap import with_swap_files
from shardmake.checkpoint.formats.unpickle import TensorRef, numel
from shardmake.checkpoint.formats.zero_files import (
    ZeroFiles,
    base_optimizer,
    check_same_step,
    load_files,
    named_folder,
    zero_stage,
)
from shardmake.checkpoint.formats.zero_tensors import (
    is_left_out,
    module_tensors,
    zero2_trained,
    zero3_buffers,
    zero3_frozen,
    zero3_trained,
)
from shardmake.core.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's states of a parameter beside the weights."""


def inner_folder(checkpoint: Path) -> Path:
    """Return the folder with the shards, which the file ``latest`` of a checkpoint names."""
    return named_folder(checkpoint / "latest")


def find(path: Path) -> dict[str, Path]:
    """Return DeepSpeed's inner folders by name: ``path``, the one in ``latest``, or all of several models or steps."""
    if _holds_states(path):
        return {path.name: path}
    tags = {entry.name: entry for entry in sorted(path.iterdir()) if entry.is_dir() and _holds_states(entry)}
    models = [name for name in tags if name.startswith("pytorch_model")]  # accelerator.save_state; latest has one
    if not (path / "latest").is_file() or len(models) > 1:
        return tags
    tag = inner_folder(path)
    if tag.name not in tags:
        raise CheckpointError(
            f"{path / 'latest'} names {tag.name}, which is not a complete checkpoint. Use an older checkpoint."
        )
    return {tag.name: tag}


def _holds_states(folder: Path) -> bool:
    return any(folder.glob("*_model_states.pt")) or any(folder.glob("*_optim_states.pt"))


def read(folder: Path, target: Target = "keep") -> Contents:
    """Read the checkpoint in ``folder`` (the one with the ``*_states.pt`` files).

    Args:
        folder: DeepSpeed's inner folder, ``global_stepN``.
        target: Type of the merged model. If the model file of ZeRO-1 or 2 already has this type, its weights are used;
            otherwise the fp32 master weights are used.

    Raises:
        CheckpointError: A file is missing, damaged, of another step or world size, or the layout is not supported.
    """
    files = load_files(folder)
    check_same_step(files)
    stage = zero_stage(files)
    if stage == 3:
        files = _with_swapped_groups(files)
        tensors = [*zero3_trained(files), *zero3_frozen(files), *zero3_buffers(files)]
    else:
        tensors = list(module_tensors(files, target))
    left_out = tuple(name for name, value in files.model[0]["module"].items() if is_left_out(name, value))
    name = f"DeepSpeed ZeRO-{stage}" if stage else "DeepSpeed without ZeRO"
    return replace(files.contents(name, files.world_size, tensors), left_out=left_out)


def read_states(folder: Path) -> dict[str, dict[str, StoredTensor]]:
    """Return the states of every trained parameter by kind (``fp32`` and `MOMENTS`) and name.

    The moments have the layout of the fp32 weights, but ZeRO-1 and 2 keep the padding at their end.

    Raises:
        CheckpointError: As for `read`, or the optimizer is not Adam.
    """
    files = load_files(folder)
    check_same_step(files)
    is_stage3 = zero_stage(files) == 3
    files = _with_swapped_groups(files) if is_stage3 else files
    trained = zero3_trained if is_stage3 else zero2_trained
    key = "fp32_flat_groups" if is_stage3 else "single_partition_of_fp32_groups"
    kinds = {"fp32": files}
    for moment in MOMENTS:
        states: list[Mapping[str, Any]] = [
            {**state, key: _moment_refs(files, state, key, moment)} for state in files.optimizer
        ]
        kinds[moment] = replace(files, optimizer=states)
    return {kind: {tensor.name: tensor.check() for tensor in trained(held)} for kind, held in kinds.items()}


def _moment_refs(files: ZeroFiles, state: Mapping[str, Any], key: str, moment: str) -> list[TensorRef]:
    held = base_optimizer(state).get("state") or {}
    found = []
    for index, weights in enumerate(state[key]):
        ref = (held.get(index) or {}).get(moment)
        if not isinstance(ref, TensorRef) or ref.numel < weights.numel:
            names = ", ".join(sorted(held.get(index) or {})) or "nothing"
            raise CheckpointError(
                f"Cannot reshard {files.folder}. Its optimizer is not Adam: it keeps {names}. "
                "Resume with the strategy and the number of ranks that wrote it."
            )
        found.append(replace(ref, shape=(weights.numel,), stride=(1,)))
    return found


def _with_swapped_groups(files: ZeroFiles) -> ZeroFiles:
    """Return ``files`` of ZeRO-3 with references to the swap files instead of empty tensors."""
    shapes, ranks = files.param_shapes, len(files.optimizer)
    states = enumerate(files.optimizer)
    return replace(
        files, optimizer=[with_swap_files(files.folder, rank, state, shapes, ranks) for rank, state in states]
    )


LATEST = "latest_universal"


def is_universal(checkpoint: Path) -> bool:
    """Return True if DeepSpeed must load ``checkpoint`` as a universal one."""
    return (checkpoint / LATEST).is_file()


def universal_folder(checkpoint: Path) -> Path:
    """Return the folder with the states, which `LATEST` names."""
    return named_folder(checkpoint / LATEST)


def read_universal(folder: Path, target: Target = "keep") -> Contents:
    """Read a universal checkpoint as ds_to_universal.py writes it: ``zero/NAME/fp32.pt`` for every trained parameter.

    Frozen parameters and buffers are in the ranks' model files beside it, as in the original checkpoint. If
    tensor-parallel ranks wrote that, the shapes in the model files are those of their parts.
    """
    tensor_parallel = any(folder.glob("mp_rank_01_*"))
    files = load_files(folder, tensor_parallel)
    is_stage3 = any(folder.glob("zero_pp_rank_*_model_states.pt"))
    trained = [
        _trained_tensor(folder, name, None if tensor_parallel else shape)
        for group in files.param_shapes
        for name, shape in group.items()
    ]
    names = {tensor.name for tensor in trained}
    rest = [*zero3_frozen(files), *zero3_buffers(files)] if is_stage3 else module_tensors(files, "keep")
    tensors = [*trained, *(tensor for tensor in rest if tensor.name not in names)]
    return files.contents("DeepSpeed universal", len(files.model), tensors)


def _trained_tensor(folder: Path, name: str, shape: tuple[int, ...] | None) -> StoredTensor:
    path = folder / "zero" / name / "fp32.pt"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. The universal checkpoint is not complete. Convert it again.")
    held = unpickle.load(path)
    ref = held.get("param") if isinstance(held, Mapping) else held
    if not isinstance(ref, TensorRef) or (shape is not None and ref.numel != numel(shape)):
        raise CheckpointError(
            f"{path} does not hold the {list(shape or ())} elements of {name}. Convert the checkpoint again."
        )
    return replace(unsharded(name, ref), shape=tuple(ref.shape if shape is None else shape))
