"""DeepSpeed's universal checkpoint, written one tensor at a time.

``zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt`` hold a parameter's states whole, ``step.pt`` their step, and
``optimizer_state.pt`` what is not a tensor. Every stage reads them at every world size, and cuts them itself.
DeepSpeed's own converter does the same for ZeRO alone, by way of temporary fragments, with every rank's file in memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats.nvme_swap import rank_folder
from shardmake.checkpoint.formats.zero import MOMENTS
from shardmake.core.atomic import write_text

LATEST = "latest_universal"
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


@dataclass(frozen=True)
class States:
    """What a checkpoint holds, whoever wrote it, but for the tensors' bytes."""

    steps: int
    """Optimizer steps done."""
    adam_step: Any
    """Adam's count of them, a tensor or a number."""
    groups: list[dict[str, Any]]
    """Adam's parameter groups: hyperparameters, and ``params``, the names in order."""
    tensor: Callable[[str, str], Any]
    """A parameter's state in its shape, fp32, by name and kind: ``fp32`` or one of `MOMENTS`."""
    scaling: Mapping[str, Any]
    """State of the loss scaler, as DeepSpeed keeps it; empty where there is none."""
    shared: Mapping[str, str]
    """By name of a parameter that is not stored on its own, the name of the one it shares."""

    @property
    def names(self) -> list[str]:
        """Every trained parameter."""
        return [name for group in self.groups for name in group["params"]]


def is_universal(checkpoint: Path) -> bool:
    """Whether DeepSpeed must be told to read ``checkpoint`` as a universal one."""
    return (checkpoint / LATEST).is_file()


def inner_folder(checkpoint: Path) -> Path:
    """The folder with the universal checkpoint, which `LATEST` names."""
    return checkpoint / (checkpoint / LATEST).read_text()


def write_universal(states: States, target: Path) -> None:
    """Write ``states`` into the checkpoint ``target``; needs memory for the largest tensor, in fp32."""
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
    for name in _MODEL_FILES:  # the stages look for different names
        torch.save(_model_state(states, target), inner / name)


def make_swap_folders(target: Path, ranks: int) -> None:
    """Make the folders that DeepSpeed copies swap files from where it keeps states on NVMe; here there are none."""
    for rank in range(ranks):
        rank_folder(inner_folder(target), rank).mkdir(parents=True, exist_ok=True)


def read_back(target: Path, name: str, kind: str) -> Any:
    """A tensor that `write_universal` wrote, mapped from disk."""
    import torch

    return torch.load(inner_folder(target) / "zero" / name / f"{kind}.pt", mmap=True, weights_only=True)["param"]


def _model_state(states: States, target: Path) -> dict[str, Any]:
    """What DeepSpeed asks of a model file; the weights themselves come from the states."""
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
        "ds_version": _version(),
    }


def _optimizer_state(states: States) -> dict[str, Any]:
    """What is not a parameter's own.

    ZeRO-3 gives the hyperparameters of the first group to all of them, weight decay too; so it gets only those that
    are the same in all.
    """
    groups = [{key: value for key, value in group.items() if key != "params"} for group in states.groups]
    common = {key: value for key, value in groups[0].items() if all(other.get(key) == value for other in groups)}
    return {
        **states.scaling,
        "ds_version": _version(),
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": states.adam_step}}, "param_groups": [common]},
    }


def _version() -> str:
    from importlib.metadata import version

    return version("deepspeed")
