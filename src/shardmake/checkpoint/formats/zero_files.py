"""The files of a DeepSpeed ZeRO checkpoint: find them, read them and check that they belong together."""

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, InstanceOf, ValidationError

from shardmake.checkpoint.formats import unpickle
from shardmake.checkpoint.formats.contents import Contents, StoredTensor
from shardmake.checkpoint.formats.pickle_machine import Inert
from shardmake.checkpoint.formats.torch_zip_reader import read_record
from shardmake.checkpoint.formats.unpickle import TensorRef
from shardmake.core.errors import CheckpointError


def _contiguous(value: TensorRef) -> TensorRef:
    if not value.is_contiguous:
        raise ValueError("is stored with gaps")
    return value


_Size = Annotated[int, Field(ge=0, lt=2**62)]
_Shapes = dict[str, tuple[_Size, ...]]
_Vector = Annotated[InstanceOf[TensorRef], AfterValidator(_contiguous)]


class _ModelFile(BaseModel):
    """The entries of a model file as DeepSpeed writes them; all may be missing or None."""

    module: dict[str, Any] | None = None
    param_shapes: Sequence[_Shapes] | None = None
    buffer_names: Sequence[str] | None = None
    frozen_param_shapes: _Shapes | None = None
    frozen_param_fragments: dict[str, _Vector] | None = None
    shared_params: dict[str, str] | None = None
    global_steps: _Size | None = None
    ds_config: dict[Any, Any] | InstanceOf[Inert] | None = None
    ds_version: str | None = None


class _OptimizerFile(BaseModel):
    """Those of an optimizer file."""

    zero_stage: _Size | InstanceOf[Inert] | None = None
    partition_count: _Size | Sequence[_Size] | None = None
    fp32_flat_groups: Sequence[_Vector] | None = None
    single_partition_of_fp32_groups: Sequence[_Vector] | None = None
    param_slice_mappings: Sequence[dict[str, InstanceOf[Inert]]] | None = None
    param_alignment_paddings: Sequence[Sequence[_Size]] | None = None


def _check(path: Path, state: Mapping[Any, Any], kind: type[BaseModel]) -> None:
    """Raise `CheckpointError` if an entry of the file ``path`` has another type than those of ``kind``."""
    try:
        kind.model_validate(state, strict=True)
    except ValidationError as error:
        found = error.errors()[0]
        raise CheckpointError(
            f"{path} has an unexpected value for {found['loc'][0]!r} ({found['msg']}). The file is damaged, or another "
            "version of DeepSpeed wrote it. Use another checkpoint."
        ) from None


_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_UNSUPPORTED = {
    r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_.*": "DeepSpeed's mixture-of-experts layers",
    r"layer_\d+-model_.*": "DeepSpeed's pipeline parallelism",
    r".*mp_rank_(?!00_)\d+_.*": "tensor or model parallelism (more than one mp_rank)",
}
_OF_EACH_RANK = ("global_steps", "frozen_param_fragments")
_CONVERT = "Convert the checkpoint with DeepSpeed's ds_to_universal.py and merge the result."
_OLDER = "Use an older checkpoint."


@dataclass(frozen=True)
class ZeroFiles:
    """The files of one checkpoint without the bytes of their tensors; both lists are in rank order.

    Only the first model file is complete.
    """

    folder: Path
    model: list[Mapping[str, Any]]
    optimizer: list[Mapping[str, Any]]

    @property
    def world_size(self) -> int:
        """Ranks that wrote the checkpoint."""
        return max(len(self.optimizer), 1)

    @property
    def param_shapes(self) -> list[Mapping[str, tuple[int, ...]]]:
        """Shapes of the trained parameters by name, one mapping per group."""
        shapes = self.model[0].get("param_shapes")
        if not isinstance(shapes, Sequence):
            raise CheckpointError(
                f"Cannot divide the flat groups in {self.folder}: the model file has no param_shapes. {_OLDER}"
            )
        return list(shapes)

    def contents(self, format: str, ranks: int, tensors: Sequence[StoredTensor]) -> Contents:
        """Return the contents of a checkpoint with ``tensors``, after checking that each is complete."""
        model = self.model[0]
        return Contents(
            format=format,
            folder=self.folder,
            step=model.get("global_steps"),
            world_size=ranks,
            tensors={tensor.name: tensor.check() for tensor in tensors},
            aliases=dict(model.get("shared_params") or {}),
            versions={"deepspeed": str(model.get("ds_version"))},
        )


def load_files(folder: Path, tensor_parallel: bool = False) -> ZeroFiles:
    """Read the files of ``folder``; of tensor-parallel groups that are already joined, read the first rank's files."""
    names = sorted(path.name for path in folder.iterdir())
    if tensor_parallel:
        names = [name for name in names if not re.match(r"mp_rank_(?!00_)\d+_", name)]
    for pattern, feature in _UNSUPPORTED.items():
        for name in names:
            if re.fullmatch(pattern, name):
                raise CheckpointError(
                    f"Cannot merge {folder / name}. The file belongs to {feature}, which is not supported. {_CONVERT}"
                )
    optimizer = _by_rank(folder, names, _OPTIMIZER_FILE)
    model = _by_rank(folder, names, _MODEL_FILE)
    if not model:
        raise CheckpointError(f"{folder} has no *_model_states.pt. The checkpoint is not complete. {_OLDER}")
    states: list[Mapping[str, Any]] = [_load_model(model[0])]
    for path in model[1:]:  # of the others only the entries in which ranks differ: the rest would take hundreds of MiB
        state = _load_model(path)
        states.append({name: state[name] for name in _OF_EACH_RANK if name in state})
    return ZeroFiles(folder, states, [_load_optimizer(path) for path in optimizer])


def _by_rank(folder: Path, names: Sequence[str], pattern: re.Pattern[str]) -> list[Path]:
    """Return the files that match, in rank order; raise `CheckpointError` if the file of a rank is missing."""
    found = {int(match[1] or 0): folder / match[0] for name in names if (match := pattern.fullmatch(name))}
    missing = sorted(set(range(max(found, default=-1))) - set(found))
    if missing:
        raise CheckpointError(
            f"{folder} lacks the files of rank {', '.join(map(str, missing))} (beside {found[max(found)].name}). "
            f"The checkpoint is not complete. {_OLDER}"
        )
    return [path for _, path in sorted(found.items())]


def _load_model(path: Path) -> Mapping[str, Any]:
    state = unpickle.load(path)
    if not isinstance(state, Mapping) or not isinstance(state.get("module"), Mapping):
        raise CheckpointError(f"{path} is not a model file of DeepSpeed: it has no entry 'module'. {_OLDER}")
    if state.get("ds_autoep_layers") or state.get("autoep_layers"):
        raise CheckpointError(
            f"Cannot merge {path}. The file belongs to DeepSpeed's AutoEP, which is not supported. {_CONVERT}"
        )
    _check(path, state, _ModelFile)
    return state


def _load_optimizer(path: Path) -> Mapping[str, Any]:
    state = unpickle.load(path)
    inner = state.get("optimizer_state_dict") if isinstance(state, Mapping) else None
    if not isinstance(inner, Mapping) or not {"fp32_flat_groups", "single_partition_of_fp32_groups"} & set(inner):
        raise CheckpointError(f"{path} is not an optimizer file of DeepSpeed ZeRO: it holds no fp32 weights. {_OLDER}")
    _check(path, inner, _OptimizerFile)
    return inner


def named_folder(file: Path) -> Path:
    """Return the folder that ``latest`` or its like names: one beside it, in the same checkpoint.

    Raises:
        CheckpointError: The file is not text, or names a folder elsewhere.
    """
    name = file.read_bytes().decode(errors="replace").strip()
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise CheckpointError(
            f"{file} names {name!r}, which is not a folder beside it. Write the folder's name into it, or name the "
            "folder itself."
        )
    return file.parent / name


def zero_stage(files: ZeroFiles) -> int:
    """Return the ZeRO stage, 0 without optimizer files.

    DeepSpeed's BF16_Optimizer, which is ZeRO-1 with another gradient type, records no stage.
    """
    if not files.optimizer:
        return 0
    stages = {_number(state["zero_stage"]) if "zero_stage" in state else 1 for state in files.optimizer}
    if len(stages) > 1:
        raise CheckpointError(f"{files.folder} mixes files of ZeRO stages {sorted(stages)}. Use another checkpoint.")
    for state in files.optimizer:
        partitions = state.get("partition_count")
        expected = max(partitions) if isinstance(partitions, Sequence) else partitions
        if expected is not None and expected != len(files.optimizer):
            raise CheckpointError(
                f"{optimizer_path(state)} was written by {expected} ranks, but {files.folder} holds the optimizer "
                f"files of {len(files.optimizer)}. Files are missing or come from another world size. {_OLDER}"
            )
    stage = stages.pop()
    if stage == 3 and len(files.model) != len(files.optimizer):
        raise CheckpointError(
            f"{files.folder} holds {len(files.model)} *_model_states.pt for {len(files.optimizer)} ranks. "
            f"The checkpoint is not complete. {_OLDER}"
        )
    return stage


def optimizer_path(state: Mapping[str, Any]) -> Path:
    """Return the optimizer file that ``state`` was read from."""
    groups = state.get("fp32_flat_groups") or state.get("single_partition_of_fp32_groups")
    assert groups, "ZeRO writes at least one group"
    return Path(groups[0].record.path)


_STAGES = ("disabled", "optimizer_states", "gradients", "weights")


def _number(value: Any) -> int:
    """Return the value of ``ZeroStageEnum(2)``, which Python 3.11.0 to 3.11.3 write by the member's name."""
    given = value.args[-1] if isinstance(value, Inert) else value
    return _STAGES.index(given) if given in _STAGES else int(given)


def check_same_step(files: ZeroFiles) -> None:
    """Raise `CheckpointError` unless all ranks wrote at the same step; DeepSpeed's own tool merges mixed steps."""
    groups = {
        "training step": [state.get("global_steps") for state in files.model],
        "optimizer step": [optimizer_step(state) for state in files.optimizer],
        "learning rate": [_learning_rate(state) for state in files.optimizer],
    }
    for quantity, values in groups.items():
        if len(set(values)) > 1:
            ranks = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise CheckpointError(
                f"{files.folder} mixes files of different saves ({quantity} of {ranks}). Use another checkpoint."
            )
    tag = re.fullmatch(r"global_step(\d+)", files.folder.name)
    step = files.model[0].get("global_steps")
    if tag and isinstance(step, int) and int(tag[1]) != step:
        raise CheckpointError(
            f"{files.folder} holds files of step {step}. Use another checkpoint, or rename the folder."
        )


def base_optimizer(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the optimizer that ZeRO wraps."""
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    return base if isinstance(base, Mapping) else {}


def _learning_rate(state: Mapping[str, Any]) -> float | None:
    groups = base_optimizer(state).get("param_groups")
    rate = groups[0].get("lr") if isinstance(groups, list) and groups and isinstance(groups[0], Mapping) else None
    if isinstance(rate, TensorRef):
        return _scalar(rate)
    return rate if isinstance(rate, int | float) else None


def optimizer_step(state: Mapping[str, Any]) -> float | None:
    """Return the steps that an optimizer counted, in the state that ZeRO saves; None if it counts none."""
    base = base_optimizer(state)
    states, groups = base.get("state"), base.get("param_groups")
    candidates = [
        *(states.values() if isinstance(states, Mapping) else ()),
        *(groups if isinstance(groups, list) else ()),
    ]
    for candidate in candidates:
        step = candidate.get("step") if isinstance(candidate, Mapping) else None
        if isinstance(step, TensorRef):
            return _scalar(step)
        if isinstance(step, int | float):
            return float(step)
    return None


def _scalar(ref: TensorRef) -> float | None:
    """Read the value of a tensor with one element from its file."""
    code = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}.get(ref.dtype)
    if code is None or ref.numel != 1:
        return None
    content = read_record(ref.record)[ref.offset : ref.offset + ref.nbytes]
    return float(struct.unpack(code, content)[0])
