"""From a universal checkpoint to torch's distributed checkpoint, as FSDP resumes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmake.errors import UserError
from shardmake.reshard.universal import MODEL_FILES, load, optimizer_step, param_groups

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"  # Accelerate's names


def write_distributed(universal: Path, source: Path, target: Path) -> None:
    """Write the states in ``universal`` (DeepSpeed's inner folder) as the two folders that FSDP reads.

    The tensors are mapped from disk, so that the page cache is all the memory this needs.

    Args:
        universal: As `write_universal` made it.
        source: ZeRO's inner folder, for the hyperparameters.
        target: The checkpoint to write.
    """
    import torch
    import torch.distributed.checkpoint as dcp

    def mapped(name: str, kind: str) -> Any:
        return torch.load(universal / "zero" / name / f"{kind}.pt", mmap=True, weights_only=True)["param"]

    model = load(universal / MODEL_FILES[0])
    _check(model, source)
    groups = [
        {**_of_torch(group), "params": list(shapes)}
        for group, shapes in zip(param_groups(source), model["param_shapes"], strict=True)
    ]
    names = [name for group in groups for name in group["params"]]
    step = torch.as_tensor(float(optimizer_step(source)))
    state = {
        name: {"step": step, "exp_avg": mapped(name, "exp_avg"), "exp_avg_sq": mapped(name, "exp_avg_sq")}
        for name in names
    }
    weights = {name: mapped(name, "fp32") for name in names}
    weights |= {alias: weights[owner] for alias, owner in (model.get("shared_params") or {}).items()}
    contents = {MODEL: {"model": weights}, OPTIMIZER: {"optimizer": {"state": state, "param_groups": groups}}}
    for folder, content in contents.items():
        dcp.save(content, storage_writer=dcp.FileSystemWriter(target / folder), no_dist=True)


def _of_torch(group: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters by the names of torch's AdamW; DeepSpeed's own Adam lacks some and has others."""
    import torch

    defaults = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
    names = {*defaults, "initial_lr"} - {"params"}
    return {name: group.get(name, defaults.get(name)) for name in names}


def _check(model: Mapping[str, Any], source: Path) -> None:
    """FSDP resumes a whole model; DeepSpeed's shards hold the trained part in full precision, and only that."""
    for what, key in (("frozen parameters", "frozen_param_shapes"), ("buffers", "buffer_names")):
        if model.get(key):
            raise UserError(f"{source} holds {what}, which are not converted for FSDP. Resume under a ZeRO strategy.")
