"""The files of a DeepSpeed ZeRO checkpoint: find them, read them and check that they belong together.

With the optimizer of ZeRO-3 on NVMe, checkpoints hold copies of the swap files. If a sub-group is swapped out, the
rank's optimizer file holds empty tensors in its place. The bytes are in ``offloaded_tensors/rankRR``:
``ID.tensor.swp`` has the fp32 weights, ``exp_avg-ID.tensor.swp`` the first moments, and so on. Each file is a flat
vector of fp32 with padding at its end. DeepSpeed derives ID from its numbers for the first and the last parameter of
the sub-group and does not save it. Trainings of Shardmake write an index of the IDs.
"""

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, InstanceOf, TypeAdapter, ValidationError

from shardmake.checkpoint.formats import unpickle
from shardmake.checkpoint.formats.contents import Contents, StoredTensor
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE
from shardmake.checkpoint.formats.pickle_machine import Inert
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord, read_record
from shardmake.checkpoint.formats.unpickle import TensorRef, numel
from shardmake.core.atomic import write_json
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
class OptimizerFile:
    """The optimizer file of a rank: its flat fp32 vectors, one for each group, and its other entries."""

    path: Path
    vectors: Sequence[TensorRef]
    state: Mapping[str, Any]

    @property
    def base(self) -> Mapping[str, Any]:
        """The state of the optimizer that ZeRO wraps."""
        base = self.state.get("base_optimizer_state", self.state.get("optimizer_state_dict"))
        return base if isinstance(base, Mapping) else {}

    def numbers(self, key: str, *places: str) -> Iterator[float]:
        """Yield the values of ``key`` in the optimizer's ``state`` by parameter, or in its ``param_groups``."""
        for held in map(self.base.get, places):
            for entry in held.values() if isinstance(held, Mapping) else held if isinstance(held, list) else ():
                value = entry.get(key) if isinstance(entry, Mapping) else None
                value = _scalar(value) if isinstance(value, TensorRef) else value
                if isinstance(value, int | float):
                    yield float(value)

    @property
    def step(self) -> float | None:
        """The steps that the optimizer counted; None if it counts none."""
        return next(self.numbers("step", "state", "param_groups"), None)


@dataclass(frozen=True)
class ZeroFiles:
    """The files of one checkpoint without the bytes of their tensors; both lists are in rank order.

    Only the first model file is complete.
    """

    folder: Path
    model: list[Mapping[str, Any]]
    optimizer: list[OptimizerFile]

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
        model, held = self.model[0], {tensor.name: tensor.check() for tensor in tensors}
        aliases, versions = dict(model.get("shared_params") or {}), {"deepspeed": str(model.get("ds_version"))}
        return Contents(format, self.folder, model.get("global_steps"), ranks, held, aliases, versions)


def load_complete(folder: Path) -> tuple[ZeroFiles, int]:
    """Read the files of ``folder``, which must be those of all ranks at one step; return the ZeRO stage too."""
    files = load_files(folder)
    _check_same_step(files)
    stage = _zero_stage(files)
    if stage == 3:
        files = replace(files, optimizer=[_with_swap_files(files, rank) for rank in range(len(files.optimizer))])
    return files, stage


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
    return ZeroFiles(folder, states, [load_optimizer(path) for path in optimizer])


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


def load_optimizer(path: Path) -> OptimizerFile:
    """Read the optimizer file of a rank."""
    state = unpickle.load(path)
    inner = state.get("optimizer_state_dict") if isinstance(state, Mapping) else None
    held: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {}
    vectors = held.get("fp32_flat_groups") or held.get("single_partition_of_fp32_groups")
    if not vectors:
        raise CheckpointError(f"{path} is not an optimizer file of DeepSpeed ZeRO: it holds no fp32 weights. {_OLDER}")
    _check(path, held, _OptimizerFile)
    return OptimizerFile(path, vectors, held)


def named_folder(file: Path) -> Path:
    """Return the folder beside ``file`` that it names, as ``latest`` does; raise `CheckpointError` for any other."""
    name = file.read_bytes().decode(errors="replace").strip()
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise CheckpointError(
            f"{file} names {name!r}, which is not a folder beside it. Write the folder's name into it, or name the "
            "folder itself."
        )
    return file.parent / name


def _zero_stage(files: ZeroFiles) -> int:
    """Return the ZeRO stage, 0 without optimizer files.

    DeepSpeed's BF16_Optimizer, which is ZeRO-1 with another gradient type, records no stage.
    """
    if not files.optimizer:
        return 0
    stages = {_number(rank.state.get("zero_stage", 1)) for rank in files.optimizer}
    if len(stages) > 1:
        raise CheckpointError(f"{files.folder} mixes files of ZeRO stages {sorted(stages)}. Use another checkpoint.")
    for rank in files.optimizer:
        partitions = rank.state.get("partition_count")
        expected = max(partitions) if isinstance(partitions, Sequence) else partitions
        if expected is not None and expected != len(files.optimizer):
            raise CheckpointError(
                f"{rank.path} was written by {expected} ranks, but {files.folder} holds the optimizer "
                f"files of {len(files.optimizer)}. Files are missing or come from another world size. {_OLDER}"
            )
    stage = stages.pop()
    if stage == 3 and len(files.model) != len(files.optimizer):
        raise CheckpointError(
            f"{files.folder} holds {len(files.model)} *_model_states.pt for {len(files.optimizer)} ranks. "
            f"The checkpoint is not complete. {_OLDER}"
        )
    return stage


_STAGES = ("disabled", "optimizer_states", "gradients", "weights")


def _number(value: Any) -> int:
    """Return the value of ``ZeroStageEnum(2)``, which Python 3.11.0 to 3.11.3 write by the member's name."""
    given = value.args[-1] if isinstance(value, Inert) else value
    return _STAGES.index(given) if given in _STAGES else int(given)


def _check_same_step(files: ZeroFiles) -> None:
    """Raise `CheckpointError` unless all ranks wrote at the same step; DeepSpeed's own tool merges mixed steps."""
    groups = {
        "training step": [state.get("global_steps") for state in files.model],
        "optimizer step": [rank.step for rank in files.optimizer],
        "learning rate": [next(rank.numbers("lr", "param_groups"), None) for rank in files.optimizer],
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


def _scalar(ref: TensorRef) -> float | None:
    code = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}.get(ref.dtype)
    if code is None or ref.numel != 1:
        return None
    content = read_record(ref.record)[ref.offset : ref.offset + ref.nbytes]
    return float(struct.unpack(code, content)[0])


SWAP_FOLDER = "offloaded_tensors"
_INDEX = TypeAdapter(list[str])
_DTYPE = "F32"


def write_swap_ids(folder: Path, ids: Sequence[str]) -> None:
    """Write the IDs of the sub-groups, in their order, into DeepSpeed's inner folder."""
    write_json(folder / SWAP_FOLDER / "sub_groups.json", list(ids))


def swap_folder(folder: Path, rank: int) -> Path:
    """Return the folder of the swap files of ``rank`` in DeepSpeed's inner ``folder``."""
    return folder / SWAP_FOLDER / f"rank{rank:02d}"


def _with_swap_files(files: ZeroFiles, number: int) -> OptimizerFile:
    """Return the optimizer file of rank ``number`` with references to the swap files in place of empty tensors."""
    rank = files.optimizer[number]
    if not (files.folder / SWAP_FOLDER).is_dir() or all(group.numel for group in rank.vectors):
        return rank
    ids, folder = _read_index(files.folder, len(rank.vectors)), swap_folder(files.folder, number)
    parts = (map(numel, group.values()) for group in files.param_shapes)
    elements = [sum(math.ceil(size / len(files.optimizer)) for size in sizes) for sizes in parts]

    def resolve(group: int, prefix: str, value: Any) -> Any:
        """Return ``value``, or the swap file of sub-group ``group`` if ``value`` is an empty tensor."""
        if not isinstance(value, TensorRef) or value.numel or not elements[group]:
            return value
        return _swap_file(folder / f"{prefix}{ids[group]}.tensor.swp", elements[group])

    base = rank.state["optimizer_state_dict"]
    moments = {
        group: {name: resolve(group, f"{name}-", value) for name, value in held.items()}
        for group, held in base["state"].items()
    }
    weights = [resolve(group, "", value) for group, value in enumerate(rank.vectors)]
    return OptimizerFile(rank.path, weights, {**rank.state, "optimizer_state_dict": {**base, "state": moments}})


def _read_index(folder: Path, sub_groups: int) -> list[str]:
    path = folder / SWAP_FOLDER / "sub_groups.json"
    try:
        ids = _INDEX.validate_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"Cannot read the NVMe swap files in {folder}. {path.name}, which maps them to parameters, is missing. "
            "Trainings of Shardmake write it: resume from this checkpoint with Shardmake and merge the next one."
        ) from None
    except ValidationError:
        ids = []
    if len(ids) != sub_groups or not all(re.fullmatch(r"\d+_\d+", id) for id in ids):
        raise CheckpointError(f"{path} is damaged. Use an older checkpoint.")
    return ids


def _swap_file(path: Path, elements: int) -> TensorRef:
    """Return the first ``elements`` of a swap file; DeepSpeed pads the file for alignment."""
    size = elements * ITEM_SIZE[_DTYPE]
    held = path.stat().st_size if path.is_file() else 0
    if held < size:
        raise CheckpointError(
            f"{path} has {held} of {size} bytes. The checkpoint is not complete. Use an older checkpoint."
        )
    return TensorRef(ZipRecord(path, 0, size, None), 0, _DTYPE, (elements,), (1,))
