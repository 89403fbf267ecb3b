"""From ZeRO's shards to DeepSpeed's universal checkpoint, one tensor at a time.

``zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt`` hold a parameter's states whole, ``step.pt`` their step, and
``optimizer_state.pt`` what is not a tensor. Every stage reads them at every world size, and cuts them itself.
DeepSpeed's own converter does the same by way of temporary fragments, with every rank's file in memory.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmake.consolidate.contents import Tensor
from shardmake.consolidate.deepspeed import read_states
from shardmake.errors import UserError
from shardmake.receipt import write_text

LATEST = "latest_universal"
_KEPT = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "ds_version")
MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def is_universal(checkpoint: Path) -> bool:
    """Whether DeepSpeed must be told to read ``checkpoint`` as a universal one."""
    return (checkpoint / LATEST).is_file()


def write_universal(source: Path, target: Path) -> None:
    """Convert DeepSpeed's inner folder ``source`` to the universal checkpoint ``target/NAME``.

    Needs memory for the largest tensor, in fp32.

    Raises:
        UserError: files are missing or of different saves, or the optimizer is not Adam.
    """
    import torch

    states = read_states(source)
    inner = target / source.name
    step = optimizer_step(source)
    for kind, tensors in states.items():
        for name, tensor in tensors.items():
            folder = inner / "zero" / name
            folder.mkdir(parents=True, exist_ok=True)
            torch.save({"param": read_tensor(tensor)}, folder / f"{kind}.pt")
    for name in states["fp32"]:
        torch.save(step, inner / "zero" / name / "step.pt")
    torch.save(_optimizer_state(source, step), inner / "zero" / "optimizer_state.pt")
    model = load(next(path for path in sorted(source.glob("*_model_states.pt")) if "rank_0" in path.name))
    for name in MODEL_FILES:  # the stages look for different names
        torch.save({**model, "module": {}}, inner / name)
    write_text(target / LATEST, source.name)


def read_tensor(tensor: Tensor) -> Any:
    """The torch tensor whose bytes lie where ``tensor`` says, in its shape."""
    import torch

    assert tensor.dtype == "F32", tensor.dtype
    values = torch.empty(tensor.numel, dtype=torch.float32)
    view: memoryview[int] = memoryview(values.numpy().view("uint8"))  # type: ignore[arg-type]
    for piece in tensor.pieces:
        assert piece.runs == 1
        with piece.record.path.open("rb") as file:
            part = view[4 * piece.at : 4 * (piece.at + piece.count)]
            if os.preadv(file.fileno(), [part], piece.record.offset + piece.start) != len(part):
                raise UserError(f"{piece.record.path} is cut off. Take an older checkpoint.")
    return values.view(tensor.shape)


def load(path: Path) -> Any:
    """What DeepSpeed put into ``path``; the ranks unpickle the same file when they resume."""
    import torch

    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def _inner(source: Path) -> Mapping[str, Any]:
    return load(min(source.glob("*zero_pp_rank_0_mp_rank_00_optim_states.pt")))["optimizer_state_dict"]


def base_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict of torch's optimizer within ZeRO's."""
    return state.get("base_optimizer_state", state.get("optimizer_state_dict", {}))


def optimizer_step(source: Path) -> Any:
    """Adam's step count as the optimizer holds it: a tensor or a number."""
    return base_state(_inner(source))["state"][0]["step"]


def param_groups(source: Path) -> list[dict[str, Any]]:
    """Hyperparameters of the optimizer's groups, without the parameters."""
    groups = base_state(_inner(source))["param_groups"]
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _optimizer_state(source: Path, step: Any) -> dict[str, Any]:
    """What is not a parameter's own.

    ZeRO-3 gives the hyperparameters of the first group to all of them, weight decay too; so it gets only those that
    are the same in all.
    """
    groups = param_groups(source)
    common = {key: value for key, value in groups[0].items() if all(other.get(key) == value for other in groups)}
    inner = _inner(source)
    return {
        **{key: inner[key] for key in _KEPT if key in inner},
        "ds_version": inner.get("ds_version", _version()),
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": [common]},
    }


def _version() -> str:
    from importlib.metadata import version

    return version("deepspeed")
