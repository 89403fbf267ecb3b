"""Checkpoints of DeepSpeed ZeRO-1, 2 and 3.

ZeRO-1 and 2: rank r's optimizer file holds a slice of each group's flat fp32 vector; the slices of all ranks, one after
the other, are the group's parameters back to back in the order of ``param_shapes``, each followed by
``param_alignment_paddings``. The model file holds the whole model in the type it computes in.

ZeRO-3: every parameter is cut into world size pieces of ceil(numel / world size) elements, the last ones padded; rank
r's flat vector holds its piece of each parameter in the order of ``param_shapes``. With the optimizer on NVMe most of
it lies in swap files (`shardmake.checkpoint.formats.nvme_swap`). Frozen parameters lie in the ranks' model files, cut
in the same way.
"""

import math
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats import unpickle
from shardmake.checkpoint.formats.contents import Contents, Flat, Piece, Tensor, whole
from shardmake.checkpoint.formats.dtypes import Target, converted
from shardmake.checkpoint.formats.nvme_swap import with_swapped
from shardmake.checkpoint.formats.unpickle import Inert, TensorRef, numel
from shardmake.core.errors import ShardmakeError

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_REFUSED = {
    r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_.*": "DeepSpeed's mixture-of-experts layers",
    r"layer_\d+-model_.*": "DeepSpeed's pipeline parallelism",
    r".*mp_rank_(?!00_)\d+_.*": "tensor or model parallelism (more than one mp_rank)",
}


def inner_folder(checkpoint: Path) -> Path:
    """The folder with the shards, which ``latest`` in a checkpoint names."""
    return checkpoint / (checkpoint / "latest").read_text().strip()


def recognises_universal(folder: Path) -> bool:
    """Whether ``folder`` is a universal checkpoint."""
    return any(folder.glob("zero/*/fp32.pt"))


def recognises(folder: Path) -> bool:
    """Whether ``folder`` is the inner folder of a DeepSpeed checkpoint (``global_stepN``)."""
    return any(folder.glob("*_model_states.pt")) or any(folder.glob("*_optim_states.pt"))


@dataclass(frozen=True)
class _Shards:
    """The files of one checkpoint, read but for their tensors; both lists are in the order of the ranks."""

    folder: Path
    model: list[Mapping[str, Any]]
    optimizer: list[Mapping[str, Any]]

    @property
    def world_size(self) -> int:
        return max(len(self.optimizer), 1)


def read(folder: Path, target: Target = "keep") -> Contents:
    """The checkpoint in ``folder`` (the one with the ``*_states.pt`` files).

    Args:
        folder: DeepSpeed's inner folder, ``global_stepN``.
        target: The type of the merged model: where the model file of ZeRO-1 or 2 holds it already, the weights are
            taken from there, else from the fp32 master weights.

    Raises:
        ShardmakeError: a file is missing, damaged, of another step or world size, or the layout is not supported.
    """
    shards = _load(folder)
    _check_same_step(shards)
    stage = _stage(shards)
    if stage == 3:
        shards = _swapped_in(shards)
        tensors = [*_zero3_trained(shards), *_zero3_frozen(shards), *_zero3_buffers(shards)]
    else:
        tensors = list(_module_first(shards, target))
    model = shards.model[0]
    return Contents(
        format=f"DeepSpeed ZeRO-{stage}" if stage else "DeepSpeed without ZeRO",
        folder=folder,
        step=model.get("global_steps"),
        world_size=shards.world_size,
        tensors={tensor.name: tensor.check() for tensor in tensors},
        aliases=dict(model.get("shared_params") or {}),
        versions={"deepspeed": str(model.get("ds_version"))},
    )


MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's states of a parameter, beside the weights."""


def read_states(folder: Path) -> dict[str, dict[str, Tensor]]:
    """By kind (``fp32`` and `MOMENTS`), by name, the states of every trained parameter of a ZeRO checkpoint.

    The moments lie in the ranks' files as the fp32 weights do, but that ZeRO-1 and 2 keep the padding at their end.

    Raises:
        ShardmakeError: as `read`; or the optimizer keeps other states than Adam's.
    """
    shards = _load(folder)
    _check_same_step(shards)
    is_stage3 = _stage(shards) == 3
    shards = _swapped_in(shards) if is_stage3 else shards
    trained = _zero3_trained if is_stage3 else _zero2_trained
    key = "fp32_flat_groups" if is_stage3 else "single_partition_of_fp32_groups"
    kinds = {"fp32": shards} | {moment: _with_moment(shards, key, moment) for moment in MOMENTS}
    return {kind: {tensor.name: tensor.check() for tensor in trained(held)} for kind, held in kinds.items()}


def _with_moment(shards: _Shards, key: str, moment: str) -> _Shards:
    """``shards`` with one of the moments in the place of the weights."""
    return replace(
        shards, optimizer=[{**state, key: _moments(shards, state, key, moment)} for state in shards.optimizer]
    )


def _moments(shards: _Shards, state: Mapping[str, Any], key: str, moment: str) -> list[TensorRef]:
    held = _base_optimizer(state).get("state") or {}
    found = []
    for index, weights in enumerate(state[key]):
        ref = (held.get(index) or {}).get(moment)
        if not isinstance(ref, TensorRef) or ref.numel < weights.numel:
            names = ", ".join(sorted(held.get(index) or {})) or "nothing"
            raise ShardmakeError(
                f"{shards.folder}: the optimizer is not Adam, it keeps {names}; it cannot be resharded."
            )
        found.append(replace(ref, shape=(weights.numel,), stride=(1,)))
    return found


def read_universal(folder: Path) -> Contents:
    """A universal checkpoint, as ds_to_universal.py makes it: ``zero/NAME/fp32.pt`` for every trained parameter.

    What was frozen, and the buffers, lie in the ranks' model files beside it, as in the checkpoint it was made from.
    Where tensor-parallel ranks wrote that, the shapes in the model files are those of their parts.
    """
    grouped = any(folder.glob("mp_rank_01_*"))
    shards = _load(folder, grouped)
    is_stage3 = any(folder.glob("zero_pp_rank_*_model_states.pt"))
    trained = [
        _universal(folder, name, None if grouped else shape)
        for group in _param_shapes(shards)
        for name, shape in group.items()
    ]
    names = {tensor.name for tensor in trained}
    rest = [*_zero3_frozen(shards), *_zero3_buffers(shards)] if is_stage3 else _module_first(shards, "keep")
    tensors = [*trained, *(tensor for tensor in rest if tensor.name not in names)]
    return Contents(
        format="DeepSpeed universal",
        folder=folder,
        step=shards.model[0].get("global_steps"),
        world_size=len(shards.model),
        tensors={tensor.name: tensor.check() for tensor in tensors},
        aliases=dict(shards.model[0].get("shared_params") or {}),
        versions={"deepspeed": str(shards.model[0].get("ds_version"))},
    )


def _universal(folder: Path, name: str, shape: tuple[int, ...] | None) -> Tensor:
    path = folder / "zero" / name / "fp32.pt"
    if not path.is_file():
        raise ShardmakeError(f"{path} is missing: the universal checkpoint is not complete. Convert it again.")
    held = unpickle.load(path)
    ref = held.get("param") if isinstance(held, Mapping) else held
    if not isinstance(ref, TensorRef) or (shape is not None and ref.numel != numel(shape)):
        raise ShardmakeError(
            f"{path} does not hold the {list(shape or ())} elements of {name}. Convert the checkpoint again."
        )
    return replace(whole(name, ref), shape=tuple(ref.shape if shape is None else shape))


def _load(folder: Path, grouped: bool = False) -> _Shards:
    """The files of ``folder``; of tensor-parallel groups, where they are put together already, the first rank's."""
    names = sorted(path.name for path in folder.iterdir())
    if grouped:
        names = [name for name in names if not re.match(r"mp_rank_(?!00_)\d+_", name)]
    for pattern, what in _REFUSED.items():
        for name in names:
            if re.fullmatch(pattern, name):
                raise ShardmakeError(
                    f"{folder / name} belongs to {what}, which Shardmake does not merge. Convert the checkpoint with "
                    "DeepSpeed's ds_to_universal.py and point to the result."
                )
    optimizer = _by_rank(folder, names, _OPTIMIZER_FILE)
    model = _by_rank(folder, names, _MODEL_FILE)
    if not model:
        raise ShardmakeError(f"{folder} holds no *_model_states.pt: the checkpoint is not complete. Take an older one.")
    return _Shards(folder, [_load_model(path) for path in model], [_load_optimizer(path) for path in optimizer])


def _by_rank(folder: Path, names: Sequence[str], pattern: re.Pattern[str]) -> list[Path]:
    """The files that match, by rank; a `ShardmakeError` names the rank that is missing."""
    found = {int(match[1] or 0): folder / match[0] for name in names if (match := pattern.fullmatch(name))}
    missing = sorted(set(range(max(found, default=-1))) - set(found))
    if missing:
        raise ShardmakeError(
            f"{folder} lacks the files of rank {', '.join(map(str, missing))} (such as the one beside "
            f"{found[max(found)].name}): the checkpoint is not complete. Take an older one."
        )
    return [path for _, path in sorted(found.items())]


def _swapped_in(shards: _Shards) -> _Shards:
    """``shards`` of ZeRO-3 with what lies in swap files."""
    shapes, ranks = _param_shapes(shards), len(shards.optimizer)
    states = enumerate(shards.optimizer)
    return replace(
        shards, optimizer=[with_swapped(shards.folder, rank, state, shapes, ranks) for rank, state in states]
    )


def _load_model(path: Path) -> Mapping[str, Any]:
    state = unpickle.load(path)
    if not isinstance(state, Mapping) or not isinstance(state.get("module"), Mapping):
        raise ShardmakeError(f"{path} is no model file of DeepSpeed: it has no entry 'module'.")
    if state.get("ds_autoep_layers") or state.get("autoep_layers"):
        raise ShardmakeError(
            f"{path} belongs to DeepSpeed's AutoEP, which Shardmake does not merge: use ds_to_universal.py."
        )
    return state


def _load_optimizer(path: Path) -> Mapping[str, Any]:
    state = unpickle.load(path)
    inner = state.get("optimizer_state_dict") if isinstance(state, Mapping) else None
    if not isinstance(inner, Mapping) or not {"fp32_flat_groups", "single_partition_of_fp32_groups"} & set(inner):
        raise ShardmakeError(f"{path} is no optimizer file of DeepSpeed ZeRO: it holds no fp32 weights.")
    return inner


def _stage(shards: _Shards) -> int:
    """ZeRO stage. DeepSpeed's BF16_Optimizer, which is ZeRO-1 with another gradient type, writes none."""
    if not shards.optimizer:
        return 0
    stages = {_number(state["zero_stage"]) if "zero_stage" in state else 1 for state in shards.optimizer}
    if len(stages) > 1:
        raise ShardmakeError(f"{shards.folder} mixes files of ZeRO stages {sorted(stages)}. Take another checkpoint.")
    for state in shards.optimizer:
        partitions = state.get("partition_count")
        expected = max(partitions) if isinstance(partitions, Sequence) else partitions
        if expected is not None and expected != len(shards.optimizer):
            raise ShardmakeError(
                f"{_file_of(state)} was written by {expected} ranks, but {shards.folder} holds the optimizer files of "
                f"{len(shards.optimizer)}: it is not complete, or files of another world size lie among them."
            )
    stage = stages.pop()
    if stage == 3 and len(shards.model) != len(shards.optimizer):
        raise ShardmakeError(
            f"{shards.folder} holds {len(shards.model)} *_model_states.pt for {len(shards.optimizer)} ranks: "
            "it is not complete. Take an older checkpoint."
        )
    return stage


def _file_of(state: Mapping[str, Any]) -> Path:
    """The optimizer file that ``state`` was read from."""
    groups = state.get("fp32_flat_groups") or state.get("single_partition_of_fp32_groups")
    assert groups, "ZeRO writes at least one group"
    return Path(groups[0].record.path)


def _number(value: Any) -> int:
    """An enumeration's value; the unpickler keeps what its constructor was given."""
    return int(value.args[0] if isinstance(value, Inert) else value)


def _check_same_step(shards: _Shards) -> None:
    """Each rank must have written at the same step; DeepSpeed's own tool merges files of two steps."""
    groups = {
        "training step": [state.get("global_steps") for state in shards.model],
        "optimizer step": [_optimizer_step(state) for state in shards.optimizer],
        "learning rate": [_learning_rate(state) for state in shards.optimizer],
    }
    for what, values in groups.items():
        if len(set(values)) > 1:
            ranks = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise ShardmakeError(
                f"{shards.folder} mixes files of different saves ({what} of {ranks}). Take another one."
            )
    tag = re.fullmatch(r"global_step(\d+)", shards.folder.name)
    step = shards.model[0].get("global_steps")
    if tag and isinstance(step, int) and int(tag[1]) != step:
        raise ShardmakeError(
            f"{shards.folder} holds files of step {step}. Take another checkpoint, or rename the folder."
        )


def _base_optimizer(state: Mapping[str, Any]) -> Mapping[str, Any]:
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    return base if isinstance(base, Mapping) else {}


def _learning_rate(state: Mapping[str, Any]) -> Any:
    groups = _base_optimizer(state).get("param_groups") or [{}]
    rate = groups[0].get("lr")
    return _scalar(rate) if isinstance(rate, TensorRef) else rate


def _optimizer_step(state: Mapping[str, Any]) -> float | None:
    base = _base_optimizer(state)
    candidates = [*(base.get("state") or {}).values(), *(base.get("param_groups") or [])]
    for candidate in candidates:
        step = candidate.get("step") if isinstance(candidate, Mapping) else None
        if step is not None:
            return _scalar(step) if isinstance(step, TensorRef) else float(step)
    return None


def _scalar(ref: TensorRef) -> float | None:
    """The value of a small tensor, read from its file."""
    code = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}.get(ref.dtype)
    if code is None or ref.numel != 1:
        return None
    with ref.record.path.open("rb") as file:
        content = os.pread(file.fileno(), ref.nbytes, ref.record.offset + ref.offset)
    return float(struct.unpack(code, content)[0])


def _module_first(shards: _Shards, target: Target) -> Iterator[Tensor]:
    """ZeRO-1 and 2: trained weights from the fp32 slices, or all from the module where that is what is wanted.

    What is in the module and not in the groups is frozen or a buffer. ZeRO-1 lists its frozen parameters nowhere
    else, which is why DeepSpeed's own tool loses them.
    """
    model = shards.model[0]
    aliases = set(model.get("shared_params") or {})
    module = {name: ref for name, ref in model["module"].items() if name not in aliases}
    strange = [name for name, ref in module.items() if not isinstance(ref, TensorRef)]
    if strange:
        raise ShardmakeError(f"{shards.folder}: {strange[0]} of the module is no tensor; such state cannot be merged.")
    trained = {name for group in _param_shapes(shards) for name in group} if shards.optimizer else set()
    if not all(converted("F32", target) == module[name].dtype for name in trained & set(module)):
        yield from _zero2_trained(shards)
        module = {name: ref for name, ref in module.items() if name not in trained}
    for name, ref in module.items():
        yield whole(name, ref)


def _param_shapes(shards: _Shards) -> list[Mapping[str, tuple[int, ...]]]:
    shapes = shards.model[0].get("param_shapes")
    if not isinstance(shapes, Sequence):
        raise ShardmakeError(f"{shards.folder}: the model file has no param_shapes, so its flat groups cannot be cut.")
    return list(shapes)


def _zero2_trained(shards: _Shards) -> Iterator[Tensor]:
    slices = [state["single_partition_of_fp32_groups"] for state in shards.optimizer]
    paddings = shards.optimizer[0].get("param_alignment_paddings")
    for index, shapes in enumerate(_param_shapes(shards)):
        ranks = [groups[index] for groups in slices]
        vector = Flat(ranks)
        at = 0
        for position, (name, shape) in enumerate(shapes.items()):
            pieces = tuple(vector.pieces(at, numel(shape), 0))
            _check_slices(shards, index, name, pieces)
            yield Tensor(name, ranks[0].dtype, shape, pieces)
            at += numel(shape) + (paddings[index][position] if paddings else 0)
        _check_length(shards.folder, index, at, vector.numel, 2 * len(ranks))


def _check_length(folder: Path, group: int, used: int, held: int, alignment: int) -> None:
    """A group's end may be padded to DeepSpeed's alignment, 2 x world size; nothing else may be left over."""
    if math.ceil(used / alignment) != math.ceil(held / alignment):
        raise ShardmakeError(f"{folder}: group {group} holds {held} elements, its parameters have {used}.")


def _check_slices(shards: _Shards, group: int, name: str, pieces: Sequence[Piece]) -> None:
    """``param_slice_mappings`` says where each rank's part of a parameter lies; both accounts must agree.

    But not with round-robin gradients: DeepSpeed 0.19 then writes the mappings in the order before the shuffle, while
    the vector, ``param_shapes`` and the module follow the one after it.
    """
    zero = (shards.model[0].get("ds_config") or {}).get("zero_optimization") or {}
    if zero.get("round_robin_gradients"):
        return
    for state in shards.optimizer:
        mappings = state.get("param_slice_mappings")
        if not mappings:
            continue
        flat = state["single_partition_of_fp32_groups"][group]
        ours = [(piece.start - flat.offset) // 4 for piece in pieces if piece.record is flat.record]
        count = sum(piece.count for piece in pieces if piece.record is flat.record)
        address = mappings[group].get(name)
        theirs = ([address.start], address.numel) if address is not None else ([], 0)
        if (ours, count) != theirs:
            raise ShardmakeError(
                f"{flat.record.path}: {name} lies at {ours} ({count} elements) by the shapes, but at {theirs} by "
                "param_slice_mappings: the files do not belong together."
            )


def _zero3_trained(shards: _Shards) -> Iterator[Tensor]:
    ranks = [Flat(state["fp32_flat_groups"]) for state in shards.optimizer]
    dtype = ranks[0].parts[0].dtype if ranks[0].parts else "F32"
    at = 0
    for shapes in _param_shapes(shards):
        for name, shape in shapes.items():
            yield Tensor(name, dtype, shape, tuple(_zero3_pieces(numel(shape), [partial(_cut, r, at) for r in ranks])))
            at += math.ceil(numel(shape) / len(ranks))
    for rank, vector in enumerate(ranks):
        if vector.numel != at:
            raise ShardmakeError(
                f"{_file_of(shards.optimizer[rank])} holds {vector.numel} elements, the parameters' shapes need {at}: "
                "the files do not belong together."
            )


def _cut(vector: Flat, begin: int, count: int, at: int) -> Iterator[Piece]:
    return vector.pieces(begin, count, at)


def _zero3_pieces(elements: int, ranks: Sequence[Any]) -> Iterator[Piece]:
    """Cut as ZeRO-3 does; each of ``ranks`` gives ``count`` elements of its part for element ``at`` of the tensor."""
    size = math.ceil(elements / len(ranks))
    for rank, cut in enumerate(ranks):
        count = min(size, elements - rank * size)
        if count > 0:
            yield from cut(count, rank * size)


def _zero3_frozen(shards: _Shards) -> Iterator[Tensor]:
    for name, shape in (shards.model[0].get("frozen_param_shapes") or {}).items():
        fragments = [state["frozen_param_fragments"][name] for state in shards.model]
        ranks = [partial(_cut, Flat([fragment]), 0) for fragment in fragments]
        yield Tensor(name, fragments[0].dtype, shape, tuple(_zero3_pieces(numel(shape), ranks)))


def _zero3_buffers(shards: _Shards) -> Iterator[Tensor]:
    module = shards.model[0]["module"]
    for name in shards.model[0].get("buffer_names") or ():
        yield whole(name, module[name])
