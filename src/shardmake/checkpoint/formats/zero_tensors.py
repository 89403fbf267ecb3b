"""The place of each tensor in the files of ZeRO-1, 2 and 3.

ZeRO-1 and 2: The optimizer file of rank r holds a slice of each group's flat fp32 vector. The slices of all ranks in
rank order are the group's parameters in the order of ``param_shapes``. Each parameter is followed by
``param_alignment_paddings`` elements. The model file holds the whole model in the compute type.

ZeRO-3: Every parameter is divided into world size pieces of ceil(numel / world size) elements, the last ones padded.
The flat vector of rank r holds its piece of each parameter in the order of ``param_shapes``. With the optimizer on
NVMe, most of the vector is in swap files (`shardmake.checkpoint.formats.nvme_swap`). Frozen parameters are in the model
files, divided in the same way.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from shardmake.checkpoint.formats.contents import FlatVector, Piece, StoredTensor, is_extra_state, unsharded
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE, Target, converted
from shardmake.checkpoint.formats.unpickle import TensorRef, numel
from shardmake.checkpoint.formats.zero_files import ZeroFiles, optimizer_path
from shardmake.core.errors import CheckpointError

_MIXED = "The files do not belong together. Use another checkpoint."


def is_left_out(name: str, value: Any) -> bool:
    """Return True for an extra state that is not a tensor."""
    return is_extra_state(name) and not isinstance(value, TensorRef)


def module_tensors(files: ZeroFiles, target: Target) -> Iterator[StoredTensor]:
    """Yield the tensors of ZeRO-1 or 2, from the module if it has type ``target``, otherwise from the fp32 slices.

    Tensors of the module that are in no group are frozen or buffers. ZeRO-1 lists its frozen parameters nowhere else,
    so DeepSpeed's own tool loses them.
    """
    model = files.model[0]
    aliases = set(model.get("shared_params") or {})
    module = {name: ref for name, ref in model["module"].items() if name not in aliases and not is_left_out(name, ref)}
    others = [name for name, ref in module.items() if not isinstance(ref, TensorRef)]
    if others:
        raise CheckpointError(
            f"Cannot merge {files.folder}. The entry {others[0]} of its module is not a tensor. Use another checkpoint."
        )
    trained = {name for group in files.param_shapes for name in group} if files.optimizer else set()
    if not all(converted("F32", target) == module[name].dtype for name in trained & set(module)):
        yield from zero2_trained(files)
        module = {name: ref for name, ref in module.items() if name not in trained}
    for name, ref in module.items():
        yield unsharded(name, ref)


def zero2_trained(files: ZeroFiles) -> Iterator[StoredTensor]:
    """Yield the trained parameters of ZeRO-1 and 2 from the slices of all ranks."""
    slices = [state["single_partition_of_fp32_groups"] for state in files.optimizer]
    paddings = files.optimizer[0].get("param_alignment_paddings")
    for index, shapes in enumerate(files.param_shapes):
        ranks = [groups[index] for groups in slices]
        vector = FlatVector(ranks)
        at = 0
        for position, (name, shape) in enumerate(shapes.items()):
            pieces = tuple(vector.pieces(at, numel(shape), 0))
            _check_slices(files, index, name, pieces)
            yield StoredTensor(name, ranks[0].dtype, shape, pieces)
            at += numel(shape) + (paddings[index][position] if paddings else 0)
        alignment = 2 * len(ranks)  # elements; a group holds its parameters, and padding up to a multiple
        if math.ceil(at / alignment) != math.ceil(vector.numel / alignment):
            raise CheckpointError(
                f"Group {index} in {files.folder} holds {vector.numel} elements, but its parameters have {at}. {_MIXED}"
            )


def _check_slices(files: ZeroFiles, group: int, name: str, pieces: Sequence[Piece]) -> None:
    """Compare ``pieces`` with ``param_slice_mappings``, which records each rank's part of a parameter.

    With round-robin gradients the mappings are ignored: DeepSpeed 0.19 writes them in the order before the shuffle.
    The vector, ``param_shapes`` and the module follow the order after the shuffle.
    """
    zero = (files.model[0].get("ds_config") or {}).get("zero_optimization") or {}
    if zero.get("round_robin_gradients"):
        return
    for state in files.optimizer:
        mappings = state.get("param_slice_mappings")
        if not mappings:
            continue
        flat = state["single_partition_of_fp32_groups"][group]
        itemsize = ITEM_SIZE[flat.dtype]
        by_shape = [(piece.start - flat.offset) // itemsize for piece in pieces if piece.record is flat.record]
        count = sum(piece.count for piece in pieces if piece.record is flat.record)
        address = mappings[group].get(name)
        by_mapping = ([address.start], address.numel) if address is not None else ([], 0)
        if (by_shape, count) != by_mapping:
            raise CheckpointError(
                f"The position of {name} in {flat.record.path} is {by_shape} ({count} elements) by the shapes, but "
                f"{by_mapping} by param_slice_mappings. {_MIXED}"
            )


def zero3_trained(files: ZeroFiles) -> Iterator[StoredTensor]:
    """Yield the trained parameters of ZeRO-3 from the pieces of all ranks."""
    ranks = [FlatVector(state["fp32_flat_groups"]) for state in files.optimizer]
    dtype = ranks[0].parts[0].dtype if ranks[0].parts else "F32"
    at = 0
    for shapes in files.param_shapes:
        for name, shape in shapes.items():
            yield StoredTensor(name, dtype, shape, tuple(_zero3_pieces(numel(shape), ranks, at)))
            at += math.ceil(numel(shape) / len(ranks))
    for rank, vector in enumerate(ranks):
        if vector.numel != at:
            raise CheckpointError(
                f"{optimizer_path(files.optimizer[rank])} holds {vector.numel} elements, but the shapes of the "
                f"parameters need {at}. {_MIXED}"
            )


def _zero3_pieces(elements: int, ranks: Sequence[FlatVector], begin: int) -> Iterator[Piece]:
    """Divide a parameter as ZeRO-3 does; each rank's part starts at element ``begin`` of its vector."""
    size = math.ceil(elements / len(ranks))
    for rank, vector in enumerate(ranks):
        count = min(size, elements - rank * size)
        if count > 0:
            yield from vector.pieces(begin, count, rank * size)


def zero3_frozen(files: ZeroFiles) -> Iterator[StoredTensor]:
    """Yield the frozen parameters of ZeRO-3."""
    for name, shape in (files.model[0].get("frozen_param_shapes") or {}).items():
        fragments = [state["frozen_param_fragments"][name] for state in files.model]
        ranks = [FlatVector([fragment]) for fragment in fragments]
        yield StoredTensor(name, fragments[0].dtype, shape, tuple(_zero3_pieces(numel(shape), ranks, 0)))


def zero3_buffers(files: ZeroFiles) -> Iterator[StoredTensor]:
    """Yield the buffers of ZeRO-3, and the tensors that modules saved as their extra state."""
    module = files.model[0]["module"]
    buffers = files.model[0].get("buffer_names") or ()
    extra = (name for name, value in module.items() if is_extra_state(name) and isinstance(value, TensorRef))
    for name in (*buffers, *extra):
        yield unsharded(name, module[name])
