"""torch's distributed checkpoint as FSDP writes and resumes it: two folders with Accelerate's names."""

from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats.dcp import MODEL_FOLDER, OPTIMIZER_FOLDER
from shardmake.checkpoint.formats.zero import MOMENTS
from shardmake.checkpoint.reshard.universal import States, read_back
from shardmake.core.errors import CheckpointError


def write_distributed(states: States, universal: Path, target: Path) -> None:
    """Write FSDP's two folders to ``target`` from ``states``, which `write_universal` wrote to ``universal``.

    The tensors are memory-mapped, so that only the page cache is used.
    """
    import torch
    import torch.distributed.checkpoint as dcp

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
    import torch

    defaults = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
    names = {*defaults, "initial_lr"} - {"params"}
    return {name: group.get(name, defaults.get(name)) for name in sorted(names)}


def states_of_fsdp(checkpoint: Path, steps: int) -> States:
    """Return the states of an FSDP checkpoint at ``steps`` steps.

    Raises:
        CheckpointError: The optimizer is not Adam, or a part of the model was not trained.
    """
    described = _entries(checkpoint / OPTIMIZER_FOLDER)
    groups = _parameter_groups(checkpoint, described)
    names = [name for group in groups for name in group["params"]]
    weights = {key.removeprefix("model.") for key in _entries(checkpoint / MODEL_FOLDER)}
    missing = [f"{kind} of {name}" for name in names for kind in MOMENTS if _key(name, kind) not in described]
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
        if kind == "fp32":
            return _read(checkpoint / MODEL_FOLDER, f"model.{name}")
        return _read(checkpoint / OPTIMIZER_FOLDER, _key(name, kind))

    return States(
        steps=steps,
        adam_step=_read(checkpoint / OPTIMIZER_FOLDER, _key(names[0], "step")),
        groups=groups,
        tensor=tensor,
        scaling={},
        shared={alias: _owner(checkpoint, alias, names) for alias in sorted(weights - set(names))},
    )


def _owner(checkpoint: Path, alias: str, names: list[str]) -> str:
    """Return the trained parameter that ``alias`` shares; FSDP stores both."""
    import torch

    described = _entries(checkpoint / MODEL_FOLDER)
    value = _read(checkpoint / MODEL_FOLDER, f"model.{alias}")
    for name in names:
        same_shape = described[f"model.{name}"].size == described[f"model.{alias}"].size
        if same_shape and torch.equal(_read(checkpoint / MODEL_FOLDER, f"model.{name}"), value):
            return name
    raise CheckpointError(f"Cannot reshard {checkpoint}. It holds {alias}, which was not trained. Resume with FSDP.")


def _key(name: str, kind: str) -> str:
    return f"optimizer.state.{name}.{kind}"


def _entries(folder: Path) -> dict[str, Any]:
    """Return the metadata of the entries in ``folder``, by torch's flat names."""
    import torch.distributed.checkpoint as dcp

    return dict(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def _parameter_groups(checkpoint: Path, described: dict[str, Any]) -> list[dict[str, Any]]:
    prefix = "optimizer.param_groups."
    groups: dict[int, dict[str, Any]] = {}
    for key in described:
        if key.startswith(prefix):
            number, _, name = key.removeprefix(prefix).partition(".")
            groups.setdefault(int(number), {})[name] = _read(checkpoint / OPTIMIZER_FOLDER, key)
    return [group for _, group in sorted(groups.items())]


def _read(folder: Path, key: str) -> Any:
    """Return one entry of a distributed checkpoint, unsharded."""
    import torch
    import torch.distributed.checkpoint as dcp

    entry = _entries(folder)[key]
    is_tensor = hasattr(entry, "size")
    held: dict[str, Any] = {key: torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None}
    dcp.load(held, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return held[key].float() if is_tensor else held[key]
