"""Read the training states from ZeRO's shards by byte ranges."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats.contents import StoredTensor
from shardmake.checkpoint.formats.zero import inner_folder, read_states
from shardmake.checkpoint.reshard.universal import States
from shardmake.core.errors import CheckpointError

_SCALING = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


def states_of_zero(checkpoint: Path) -> States:
    """Return the states of a checkpoint of ZeRO-1, 2 or 3.

    Raises:
        CheckpointError: Files are missing or of different saves, or the optimizer is not Adam.
    """
    folder = inner_folder(checkpoint)
    tensors = read_states(folder)
    model = _load(min(folder.glob("*mp_rank_00_model_states.pt")))
    inner = _load(min(folder.glob("*zero_pp_rank_0_mp_rank_00_optim_states.pt")))["optimizer_state_dict"]
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
    )


def frozen_or_buffers(checkpoint: Path) -> str:
    """Name the tensors of a ZeRO checkpoint that are not trained parameters; return an empty string without any."""
    folder = inner_folder(checkpoint)
    model = _load(min(folder.glob("*mp_rank_00_model_states.pt")))
    kinds = {"frozen parameters": "frozen_param_shapes", "buffers": "buffer_names"}
    return " and ".join(kind for kind, key in kinds.items() if model.get(key))


def read_tensor(tensor: StoredTensor) -> Any:
    """Read the bytes of ``tensor`` into a torch tensor of its shape."""
    import torch

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
    import torch

    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
