"""torch's distributed checkpoint as FSDP writes and resumes it: two folders, by Accelerate's names."""

from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats.zero import MOMENTS
from shardmake.checkpoint.reshard.universal import States, read_back
from shardmake.core.errors import ShardmakeError

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


def write_distributed(states: States, universal: Path, target: Path) -> None:
    """Write what `write_universal` made of ``states`` in ``universal`` as FSDP's two folders in ``target``.

    The tensors are mapped from disk, so that the page cache is all the memory this needs.
    """
    import torch
    import torch.distributed.checkpoint as dcp

    step = torch.as_tensor(float(states.adam_step))
    moments = {
        name: {"step": step, **{kind: read_back(universal, name, kind) for kind in MOMENTS}} for name in states.names
    }
    weights = {name: read_back(universal, name, "fp32") for name in states.names}
    weights |= {alias: weights[owner] for alias, owner in states.shared.items()}
    groups = [{**_of_torch(group), "params": group["params"]} for group in states.groups]
    contents = {MODEL: {"model": weights}, OPTIMIZER: {"optimizer": {"state": moments, "param_groups": groups}}}
    for folder, content in contents.items():
        dcp.save(content, storage_writer=dcp.FileSystemWriter(target / folder), no_dist=True)


def _of_torch(group: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters by the names of torch's AdamW; DeepSpeed's own Adam lacks some and has others."""
    import torch

    defaults = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
    names = {*defaults, "initial_lr"} - {"params"}
    return {name: group.get(name, defaults.get(name)) for name in sorted(names)}


def states_of_fsdp(checkpoint: Path, steps: int) -> States:
    """The states of a checkpoint of FSDP at ``steps`` steps.

    Raises:
        ShardmakeError: the optimizer is not Adam, or not all of the model was trained.
    """
    described = _described(checkpoint / OPTIMIZER)
    groups = _parameter_groups(checkpoint, described)
    names = [name for group in groups for name in group["params"]]
    weights = {key.removeprefix("model.") for key in _described(checkpoint / MODEL)}
    missing = [f"{kind} of {name}" for name in names for kind in MOMENTS if _key(name, kind) not in described]
    if missing:
        raise ShardmakeError(
            f"{checkpoint}: the optimizer is not Adam, it has no {missing[0]}; it cannot be resharded."
        )
    if absent := sorted(set(names) - weights):
        raise ShardmakeError(f"{checkpoint} holds adapters ({absent[0]}), which go on under FSDP only.")

    def tensor(name: str, kind: str) -> Any:
        folder, key = (MODEL, f"model.{name}") if kind == "fp32" else (OPTIMIZER, _key(name, kind))
        return _read(checkpoint / folder, key)

    return States(
        steps=steps,
        adam_step=_read(checkpoint / OPTIMIZER, _key(names[0], "step")),
        groups=groups,
        tensor=tensor,
        scaling={},
        shared={alias: _owner(checkpoint, alias, names) for alias in sorted(weights - set(names))},
    )


def _owner(checkpoint: Path, alias: str, names: list[str]) -> str:
    """The trained parameter that ``alias`` is another name of: FSDP stores both."""
    import torch

    described = _described(checkpoint / MODEL)
    value = _read(checkpoint / MODEL, f"model.{alias}")
    for name in names:
        same_shape = described[f"model.{name}"].size == described[f"model.{alias}"].size
        if same_shape and torch.equal(_read(checkpoint / MODEL, f"model.{name}"), value):
            return name
    raise ShardmakeError(f"{checkpoint} holds {alias}, which was not trained; it goes on under FSDP only.")


def _key(name: str, kind: str) -> str:
    return f"optimizer.state.{name}.{kind}"


def _described(folder: Path) -> dict[str, Any]:
    """What lies in ``folder``, by torch's flat names."""
    import torch.distributed.checkpoint as dcp

    return dict(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def _parameter_groups(checkpoint: Path, described: dict[str, Any]) -> list[dict[str, Any]]:
    prefix = "optimizer.param_groups."
    groups: dict[int, dict[str, Any]] = {}
    for key in described:
        if key.startswith(prefix):
            number, _, name = key.removeprefix(prefix).partition(".")
            groups.setdefault(int(number), {})[name] = _read(checkpoint / OPTIMIZER, key)
    return [group for _, group in sorted(groups.items())]


def _read(folder: Path, key: str) -> Any:
    """One entry of a distributed checkpoint, whole, whatever pieces it is stored in."""
    import torch
    import torch.distributed.checkpoint as dcp

    entry = _described(folder)[key]
    is_tensor = hasattr(entry, "size")
    held: dict[str, Any] = {key: torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None}
    dcp.load(held, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return held[key].float() if is_tensor else held[key]
