"""Checkpoints of DeepSpeed: ZeRO-1, 2 and 3, and universal ones. The place of each tensor in their files.

ZeRO-1 and 2: The optimizer file of rank r holds a slice of each group's flat fp32 vector. The slices of all ranks in
rank order are the group's parameters in the order of ``param_shapes``. Each parameter is followed by
``param_alignment_paddings`` elements. The model file holds the whole model in the compute type.

ZeRO-3: Every parameter is divided into world size pieces of ceil(numel / world size) elements, the last ones padded.
The flat vector of rank r holds its piece of each parameter in the order of ``param_shapes``. With the optimizer on
NVMe, most of the vector is in swap files. Frozen parameters are in the model files, divided in the same way.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats import unpickle
from shardmake.checkpoint.formats.contents import Contents, Piece, StoredTensor, flat_pieces, is_extra_state, unsharded
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE, Target, converted
from shardmake.checkpoint.formats.unpickle import TensorRef, numel
from shardmake.checkpoint.formats.zero_files import OptimizerFile, ZeroFiles, load_complete, load_files, named_folder
from shardmake.core.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's states of a parameter beside the weights."""
LATEST = "latest_universal"
_MIXED = "The files do not belong together. Use another checkpoint."


def inner_folder(checkpoint: Path) -> Path:
    """Return the folder with the shards, which the file ``latest`` of a checkpoint names."""
    return named_folder(checkpoint / "latest")


def is_universal(checkpoint: Path) -> bool:
    """Return True if DeepSpeed must load ``checkpoint`` as a universal one."""
    return (checkpoint / LATEST).is_file()


def universal_folder(checkpoint: Path) -> Path:
    """Return the folder with the states, which `LATEST` names."""
    return named_folder(checkpoint / LATEST)


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

    ``target`` is the type of the merged model. If the model file of ZeRO-1 or 2 already has this type, its weights are
    used; otherwise the fp32 master weights are used. Raise `CheckpointError` for a file that is missing, damaged, of
    another step or world size, or of a layout that is not supported.
    """
    files, stage = load_complete(folder)
    if stage == 3:
        tensors = [*_zero3_trained(files), *_zero3_frozen(files), *_zero3_buffers(files)]
    else:
        tensors = list(_module_tensors(files, target))
    left_out = tuple(name for name, value in files.model[0]["module"].items() if _is_left_out(name, value))
    name = f"DeepSpeed ZeRO-{stage}" if stage else "DeepSpeed without ZeRO"
    return replace(files.contents(name, max(len(files.optimizer), 1), tensors), left_out=left_out)


def read_states(folder: Path) -> dict[str, dict[str, StoredTensor]]:
    """Return the states of every trained parameter by kind (``fp32`` and `MOMENTS`) and name.

    The moments have the layout of the fp32 weights, but ZeRO-1 and 2 keep the padding at their end. Raise
    `CheckpointError` as `read` does, and if the optimizer is not Adam.
    """
    files, stage = load_complete(folder)
    kinds = {"fp32": files}
    for moment in MOMENTS:
        kinds[moment] = replace(files, optimizer=[_of_moment(folder, rank, moment) for rank in files.optimizer])
    trained = _zero3_trained if stage == 3 else _zero2_trained
    return {kind: {tensor.name: tensor.check() for tensor in trained(held)} for kind, held in kinds.items()}


def _of_moment(folder: Path, rank: OptimizerFile, moment: str) -> OptimizerFile:
    """Return an optimizer file with one of Adam's moments in place of the weights."""
    held = rank.base.get("state") or {}
    found = []
    for index, weights in enumerate(rank.vectors):
        ref = (held.get(index) or {}).get(moment)
        if not isinstance(ref, TensorRef) or ref.numel < weights.numel:
            names = ", ".join(sorted(held.get(index) or {})) or "nothing"
            raise CheckpointError(
                f"Cannot reshard {folder}. Its optimizer is not Adam: it keeps {names}. "
                "Resume with the strategy and the number of ranks that wrote it."
            )
        found.append(replace(ref, shape=(weights.numel,), stride=(1,)))
    return replace(rank, vectors=found)


def _is_left_out(name: str, value: Any) -> bool:
    return is_extra_state(name) and not isinstance(value, TensorRef)


def _module_tensors(files: ZeroFiles, target: Target) -> Iterator[StoredTensor]:
    """Yield the tensors of ZeRO-1 or 2, from the module if it has type ``target``, otherwise from the fp32 slices.

    Tensors of the module that are in no group are frozen or buffers. ZeRO-1 lists its frozen parameters nowhere else,
    so DeepSpeed's own tool loses them.
    """
    model = files.model[0]
    aliases = set(model.get("shared_params") or {})
    module = {name: ref for name, ref in model["module"].items() if name not in aliases and not _is_left_out(name, ref)}
    others = [name for name, ref in module.items() if not isinstance(ref, TensorRef)]
    if others:
        raise CheckpointError(
            f"Cannot merge {files.folder}. The entry {others[0]} of its module is not a tensor. Use another checkpoint."
        )
    trained = {name for group in files.param_shapes for name in group} if files.optimizer else set()
    if not all(converted("F32", target) == module[name].dtype for name in trained & set(module)):
        yield from _zero2_trained(files)
        module = {name: ref for name, ref in module.items() if name not in trained}
    for name, ref in module.items():
        yield unsharded(name, ref)


def _zero2_trained(files: ZeroFiles) -> Iterator[StoredTensor]:
    paddings = files.optimizer[0].state.get("param_alignment_paddings")
    for index, shapes in enumerate(files.param_shapes):
        ranks = [rank.vectors[index] for rank in files.optimizer]
        at = 0
        for position, (name, shape) in enumerate(shapes.items()):
            pieces = tuple(flat_pieces(ranks, at, numel(shape)))
            _check_slices(files, index, name, pieces)
            yield StoredTensor(name, ranks[0].dtype, shape, pieces)
            at += numel(shape) + (paddings[index][position] if paddings else 0)
        alignment = 2 * len(ranks)  # elements; a group holds its parameters, and padding up to a multiple
        held = sum(ref.numel for ref in ranks)
        if math.ceil(at / alignment) != math.ceil(held / alignment):
            raise CheckpointError(
                f"Group {index} in {files.folder} holds {held} elements, but its parameters have {at}. {_MIXED}"
            )


def _check_slices(files: ZeroFiles, group: int, name: str, pieces: Sequence[Piece]) -> None:
    """Compare ``pieces`` with ``param_slice_mappings``, which records each rank's part of a parameter.

    With round-robin gradients the mappings are ignored: DeepSpeed 0.19 writes them in the order before the shuffle.
    The vector, ``param_shapes`` and the module follow the order after the shuffle.
    """
    zero = (files.model[0].get("ds_config") or {}).get("zero_optimization") or {}
    if zero.get("round_robin_gradients"):
        return
    for rank in files.optimizer:
        mappings = rank.state.get("param_slice_mappings")
        if not mappings:
            continue
        flat = rank.vectors[group]
        held = [piece for piece in pieces if piece.record is flat.record]
        starts = [(piece.start - flat.offset) // ITEM_SIZE[flat.dtype] for piece in held]
        by_shape = starts, sum(piece.count for piece in held)
        address = mappings[group].get(name)
        by_mapping = ([address.start], address.numel) if address is not None else ([], 0)
        if by_shape != by_mapping:
            raise CheckpointError(
                f"The position of {name} in {rank.path} is {starts} ({by_shape[1]} elements) by the shapes, but "
                f"{by_mapping} by param_slice_mappings. {_MIXED}"
            )


def _zero3_trained(files: ZeroFiles) -> Iterator[StoredTensor]:
    ranks, at = [rank.vectors for rank in files.optimizer], 0
    for shapes in files.param_shapes:
        for name, shape in shapes.items():
            yield _zero3_tensor(name, shape, ranks, at)
            at += math.ceil(numel(shape) / len(ranks))
    for rank in files.optimizer:
        if (held := sum(ref.numel for ref in rank.vectors)) != at:
            raise CheckpointError(
                f"{rank.path} holds {held} elements, but the shapes of the parameters need {at}. {_MIXED}"
            )


def _zero3_tensor(name: str, shape: tuple[int, ...], ranks: Sequence[Sequence[TensorRef]], begin: int) -> StoredTensor:
    """Divide a parameter as ZeRO-3 does; each rank's part starts at element ``begin`` of its vector."""
    elements, pieces = numel(shape), list[Piece]()
    size = math.ceil(elements / len(ranks))
    for rank, vectors in enumerate(ranks):
        pieces += flat_pieces(vectors, begin, max(0, min(size, elements - rank * size)), rank * size)
    return StoredTensor(name, ranks[0][0].dtype, shape, tuple(pieces))


def _zero3_frozen(files: ZeroFiles) -> Iterator[StoredTensor]:
    for name, shape in (files.model[0].get("frozen_param_shapes") or {}).items():
        yield _zero3_tensor(name, shape, [[it["frozen_param_fragments"][name]] for it in files.model], 0)


def _zero3_buffers(files: ZeroFiles) -> Iterator[StoredTensor]:
    """Yield the buffers of ZeRO-3, and the tensors that modules saved as their extra state."""
    module = files.model[0]["module"]
    buffers = files.model[0].get("buffer_names") or ()
    extra = (name for name, value in module.items() if is_extra_state(name) and isinstance(value, TensorRef))
    for name in (*buffers, *extra):
        yield unsharded(name, module[name])


def read_universal(folder: Path, target: Target = "keep") -> Contents:
    """Read a universal checkpoint as ds_to_universal.py writes it: ``zero/NAME/fp32.pt`` for every trained parameter.

    Frozen parameters and buffers are in the ranks' model files beside it, as in the original checkpoint. If
    tensor-parallel ranks wrote that, the shapes in the model files are those of their parts.
    """
    tensor_parallel = any(folder.glob("mp_rank_01_*"))
    files = load_files(folder, tensor_parallel)
    is_stage3 = any(folder.glob("zero_pp_rank_*_model_states.pt"))
    trained = {
        name: _universal_tensor(folder, name, None if tensor_parallel else shape)
        for group in files.param_shapes
        for name, shape in group.items()
    }
    rest = [*_zero3_frozen(files), *_zero3_buffers(files)] if is_stage3 else _module_tensors(files, "keep")
    tensors = [*trained.values(), *(tensor for tensor in rest if tensor.name not in trained)]
    return files.contents("DeepSpeed universal", len(files.model), tensors)


def _universal_tensor(folder: Path, name: str, shape: tuple[int, ...] | None) -> StoredTensor:
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
