"""The training states in checkpoints: read from ZeRO or FSDP, written as universal or distributed checkpoint.

DeepSpeed's universal checkpoint is written one tensor at a time. ``zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt`` hold a
parameter's unsharded states, ``step.pt`` their step, and ``optimizer_state.pt`` everything that is not a tensor. Every
ZeRO stage reads and shards them at every world size. DeepSpeed's own converter supports ZeRO only, writes temporary
fragments and holds every rank's file in memory.

torch's distributed checkpoint is two folders with Accelerate's names, as FSDP writes and resumes it. ZeRO's shards are
read by byte ranges.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from shardmake.checkpoint.formats.contents import StoredTensor
from shardmake.checkpoint.formats.dcp import MODEL_FOLDER, OPTIMIZER_FOLDER
from shardmake.checkpoint.formats.zero import LATEST, MOMENTS, inner_folder, read_states, universal_folder
from shardmake.core.atomic import write_text
from shardmake.core.errors import CheckpointError
from shardmake.core.run_folder import make_folder

_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


@dataclass(frozen=True)
class States:
    """The training states of a checkpoint in any format, without the bytes of the tensors."""

    steps: int
    """Optimizer steps done."""
    adam_step: Any
    """Adam's step count, a tensor or a number."""
    groups: list[dict[str, Any]]
    """Adam's parameter groups: hyperparameters and ``params``, the names in order."""
    tensor: Callable[[str, str], Any]
    """Function that returns a parameter's fp32 state by name and kind: ``fp32`` or one of `MOMENTS`."""
    scaling: Mapping[str, Any]
    """State of DeepSpeed's loss scaler; empty without one."""
    shared: Mapping[str, str]
    """By name of a parameter that is not stored itself, the name of the parameter that it shares."""
    rest: str = ""
    """The kinds of tensors in the checkpoint that are not trained parameters."""

    @property
    def names(self) -> list[str]:
        """Names of all trained parameters."""
        return [name for group in self.groups for name in group["params"]]


def write_universal(states: States, target: Path) -> None:
    """Write ``states`` into the checkpoint ``target``; memory holds one tensor in fp32 at a time."""
    inner = target / f"global_step{states.steps}"
    for name in states.names:
        folder = inner / "zero" / name
        make_folder(folder)
        for kind in ("fp32", *MOMENTS):
            torch.save({"param": states.tensor(name, kind)}, folder / f"{kind}.pt")
        torch.save(states.adam_step, folder / "step.pt")
    torch.save(_optimizer_state(states), inner / "zero" / "optimizer_state.pt")
    write_text(target / LATEST, inner.name)
    for name in _MODEL_FILES:  # the ZeRO stages read different names
        torch.save(_model_state(states, target), inner / name)


def read_back(target: Path, name: str, kind: str) -> Any:
    """Return a tensor that `write_universal` wrote, memory-mapped."""
    return torch.load(universal_folder(target) / "zero" / name / f"{kind}.pt", mmap=True, weights_only=True)["param"]


def _model_state(states: States, target: Path) -> dict[str, Any]:
    """Return the entries that DeepSpeed requires in a model file; it reads the weights from the states."""
    shapes = [{name: read_back(target, name, "fp32").shape for name in group["params"]} for group in states.groups]
    return {
        "module": {},
        "param_shapes": shapes,
        "shared_params": dict(states.shared),
        "lr_scheduler": None,
        "global_steps": states.steps,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": version("deepspeed"),
    }


def _optimizer_state(states: States) -> dict[str, Any]:
    """Return the optimizer state that belongs to no single parameter.

    ZeRO-3 applies the hyperparameters of the first group, weight decay included, to all groups. The state therefore
    holds only those that are the same in all groups.
    """
    groups = [{key: value for key, value in group.items() if key != "params"} for group in states.groups]
    common = {key: value for key, value in groups[0].items() if all(other.get(key) == value for other in groups)}
    return {
        **states.scaling,
        "ds_version": version("deepspeed"),
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": states.adam_step}}, "param_groups": [common]},
    }


_SCALING = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


def states_of_zero(checkpoint: Path) -> States:
    """Return the states of a checkpoint of ZeRO-1, 2 or 3; raise `CheckpointError` if the optimizer is not Adam."""
    folder = inner_folder(checkpoint)
    tensors = read_states(folder)
    model = _load(min(folder.glob("*mp_rank_00_model_states.pt")))
    inner = _load(min(folder.glob("*zero_pp_rank_0_mp_rank_00_optim_states.pt")))["optimizer_state_dict"]
    others = {"frozen parameters": "frozen_param_shapes", "buffers": "buffer_names"}
    adam: Mapping[str, Any] = inner.get("base_optimizer_state", inner.get("optimizer_state_dict"))
    return States(
        steps=model["global_steps"],
        adam_step=adam["state"][0]["step"],
        groups=[
            {**group, "params": [name for index in group["params"] for name in model["param_shapes"][index]]}
            for group in adam["param_groups"]  # in ZeRO-3, each has one or more sub-groups
        ],
        tensor=lambda name, kind: read_tensor(tensors[kind][name]),
        scaling={key: inner[key] for key in _SCALING if key in inner},
        shared=model.get("shared_params") or {},
        rest=" and ".join(kind for kind, key in others.items() if model.get(key)),
    )


def read_tensor(tensor: StoredTensor) -> Any:
    """Read the bytes of ``tensor`` into a torch tensor of its shape."""
    assert tensor.dtype == "F32", tensor.dtype
    values = torch.empty(tensor.numel, dtype=torch.float32)
    view: memoryview[int] = memoryview(values.numpy().view("uint8"))  # type: ignore[arg-type]
    for piece in tensor.pieces:
        assert piece.runs == 1
        with piece.record.path.open("rb") as file:
            file.seek(piece.record.offset + piece.start)
            if file.readinto(view[4 * piece.at : 4 * (piece.at + piece.count)]) < 4 * piece.count:
                raise CheckpointError(f"{piece.record.path} is truncated. Use an older checkpoint.")
    return values.view(tensor.shape)


def _load(path: Path) -> Any:
    """Load a file of DeepSpeed; the ranks unpickle the same files when they resume."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def write_distributed(states: States, universal: Path, target: Path) -> None:
    """Write FSDP's two folders to ``target`` from ``states``, which `write_universal` wrote to ``universal``.

    The tensors are memory-mapped, so that only the page cache is used.
    """
    step = torch.as_tensor(float(states.adam_step))
    moments = {
        name: {"step": step, **{kind: read_back(universal, name, kind) for kind in MOMENTS}} for name in states.names
    }
    weights = {name: read_back(universal, name, "fp32") for name in states.names}
    weights |= {alias: weights[owner] for alias, owner in states.shared.items()}
    groups = [{**_torch_settings(group), "params": group["params"]} for group in states.groups]
    optimizer = {"state": moments, "param_groups": groups}
    contents = {MODEL_FOLDER: {"model": weights}, OPTIMIZER_FOLDER: {"optimizer": optimizer}}
    for folder, content in contents.items():
        dcp.save(content, storage_writer=dcp.FileSystemWriter(target / folder), no_dist=True)


def _torch_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of torch's AdamW; DeepSpeed's Adam lacks some of them and has others."""
    defaults = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
    names = {*defaults, "initial_lr"} - {"params"}
    return {name: group.get(name, defaults.get(name)) for name in sorted(names)}


def states_of_fsdp(checkpoint: Path, steps: int) -> States:
    """Return the states of an FSDP checkpoint at ``steps`` steps.

    Raise `CheckpointError` if the optimizer is not Adam, or a part of the model was not trained.
    """
    model, optimizer = (_Entries(checkpoint / folder) for folder in (MODEL_FOLDER, OPTIMIZER_FOLDER))
    groups = _parameter_groups(optimizer)
    names = [name for group in groups for name in group["params"]]
    weights = {key.removeprefix("model.") for key in model.described}
    missing = [f"{kind} of {name}" for name in names for kind in MOMENTS if _key(name, kind) not in optimizer.described]
    if missing:
        raise CheckpointError(
            f"Cannot reshard {checkpoint}. Its optimizer is not Adam: it has no {missing[0]}. Resume with FSDP."
        )
    if absent := sorted(set(names) - weights):
        raise CheckpointError(
            f"Cannot reshard {checkpoint}. It holds adapters ({absent[0]}), which only FSDP can resume. "
            "Resume with FSDP."
        )

    def tensor(name: str, kind: str) -> Any:
        return model.read(f"model.{name}") if kind == "fp32" else optimizer.read(_key(name, kind))

    return States(
        steps=steps,
        adam_step=optimizer.read(_key(names[0], "step")),
        groups=groups,
        tensor=tensor,
        scaling={},
        shared={alias: _owner(checkpoint, model, alias, names) for alias in sorted(weights - set(names))},
    )


def _owner(checkpoint: Path, model: "_Entries", alias: str, names: list[str]) -> str:
    """Return the trained parameter that ``alias`` shares; FSDP stores both."""
    value = model.read(f"model.{alias}")
    for name in names:
        if model.described[f"model.{name}"].size == value.shape and torch.equal(model.read(f"model.{name}"), value):
            return name
    raise CheckpointError(f"Cannot reshard {checkpoint}. It holds {alias}, which was not trained. Resume with FSDP.")


def _key(name: str, kind: str) -> str:
    return f"optimizer.state.{name}.{kind}"


def _parameter_groups(optimizer: "_Entries") -> list[dict[str, Any]]:
    prefix = "optimizer.param_groups."
    groups: dict[int, dict[str, Any]] = {}
    for key in optimizer.described:
        if key.startswith(prefix):
            number, _, name = key.removeprefix(prefix).partition(".")
            groups.setdefault(int(number), {})[name] = optimizer.read(key)
    return [group for _, group in sorted(groups.items())]


class _Entries(dcp.FileSystemReader):
    """The entries of a distributed checkpoint by torch's flat names; the metadata of all is read once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.metadata = super().read_metadata()
        self.described: dict[str, Any] = dict(self.metadata.state_dict_metadata)

    def read_metadata(self, *_: Any, **__: Any) -> dcp.Metadata:
        """Return the metadata; `dcp.load` asks for it with every tensor."""
        return self.metadata

    def read(self, key: str) -> Any:
        """Return one entry, unsharded."""
        entry = self.described[key]
        is_tensor = hasattr(entry, "size")
        held: dict[str, Any] = {key: torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None}
        dcp.load(held, storage_reader=self, no_dist=True)
        return held[key].float() if is_tensor else held[key]
