"""DeepSpeed's universal checkpoint, written one tensor at a time.

``zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt`` hold a parameter's unsharded states, ``step.pt`` their step, and
``optimizer_state.pt`` everything that is not a tensor. Every ZeRO stage reads and shards them at every world size.
DeepSpeed's own converter supports ZeRO only, writes temporary fragments and holds every rank's file in memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats.nvme_swap import rank_folder
from shardmake.checkpoint.formats.universal import LATEST, inner_folder
from shardmake.checkpoint.formats.zero import MOMENTS
from shardmake.core.atomic import write_text

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

    @property
    def names(self) -> list[str]:
        """Names of all trained parameters."""
        return [name for group in self.groups for name in group["params"]]


def write_universal(states: States, target: Path) -> None:
    """Write ``states`` into the checkpoint ``target``; memory holds one tensor in fp32 at a time."""
    import torch

    inner = target / f"global_step{states.steps}"
    for name in states.names:
        folder = inner / "zero" / name
        folder.mkdir(parents=True, exist_ok=True)
        for kind in ("fp32", *MOMENTS):
            torch.save({"param": states.tensor(name, kind)}, folder / f"{kind}.pt")
        torch.save(states.adam_step, folder / "step.pt")
    torch.save(_optimizer_state(states), inner / "zero" / "optimizer_state.pt")
    write_text(target / LATEST, inner.name)
    for name in _MODEL_FILES:  # the ZeRO stages read different names
        torch.save(_model_state(states, target), inner / name)


def make_swap_folders(target: Path, ranks: int) -> None:
    """Create the empty folders from which DeepSpeed copies swap files if its states are on NVMe."""
    for rank in range(ranks):
        rank_folder(inner_folder(target), rank).mkdir(parents=True, exist_ok=True)


def read_back(target: Path, name: str, kind: str) -> Any:
    """Return a tensor that `write_universal` wrote, memory-mapped."""
    import torch

    return torch.load(inner_folder(target) / "zero" / name / f"{kind}.pt", mmap=True, weights_only=True)["param"]


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
