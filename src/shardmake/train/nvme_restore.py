"""ZeRO-3 with its optimizer on NVMe: what a checkpoint lacks of it, and what DeepSpeed does not read back.

DeepSpeed 0.19 copies its swap files into a checkpoint, and when it resumes it copies them back and takes the weights
from them. Nothing says which file is which sub-group's. And of the ranks' optimizer files it reads nothing: sub-groups
too small to be swapped go on from the base model, Adam's moments and its step count from zero, all without a word.
Of a universal checkpoint it reads no states at all.
"""

from pathlib import Path
from typing import Any

import torch

from shardmake.checkpoint.formats.nvme_swap import write_index
from shardmake.checkpoint.formats.zero import MOMENTS, inner_folder
from shardmake.checkpoint.reshard import universal

_SCALING = ("loss_scaler", "dynamic_loss_scale", "overflow")


def is_swapping(engine: Any) -> bool:
    """Whether DeepSpeed's ``engine`` keeps optimizer states on NVMe."""
    return getattr(getattr(engine, "optimizer", None), "swap_optimizer", False)


def note_sub_groups(engine: Any, checkpoint: Path) -> None:
    """Write beside the swap files that ``engine`` copied into ``checkpoint`` whose they are; on the first rank."""
    if is_swapping(engine) and engine.global_rank == 0:
        zero = engine.optimizer
        write_index(inner_folder(checkpoint), [str(weights.ds_id) for weights in zero.fp32_partitioned_groups_flat])


def restore(engine: Any, checkpoint: Path) -> None:
    """Give ``engine``, which has read ``checkpoint`` in DeepSpeed's way, the rest of it; every rank takes part.

    DeepSpeed has copied the swap files back before.
    """
    if not is_swapping(engine):
        return
    engine.optimizer.checkpoint_event_prologue()
    if engine.load_universal_checkpoint():
        _read_universal(engine.optimizer, universal.inner_folder(checkpoint) / "zero")
    else:
        _read_rest(engine, checkpoint)
    engine.optimizer.checkpoint_event_epilogue()


def _read_rest(engine: Any, checkpoint: Path) -> None:
    zero = engine.optimizer
    file = engine._get_zero_ckpt_name(str(checkpoint), inner_folder(checkpoint).name)
    saved = torch.load(file, map_location="cpu", weights_only=False)["optimizer_state_dict"]
    for name in _SCALING:
        setattr(zero, name, saved[name])
    zero._set_fp32_optimizer_param_groups()
    zero.optimizer.load_state_dict(saved["optimizer_state_dict"])
    zero._clear_fp32_optimizer_param_groups()
    for number, weights in enumerate(saved["fp32_flat_groups"]):
        if zero._swappable_optimizer_subgroup(number):
            _leave_on_disk(zero, number)
        else:
            zero.fp32_partitioned_groups_flat[number].data.copy_(weights)
            zero._reassign_or_swap_out_partitioned_parameters(number)


def _leave_on_disk(zero: Any, number: int) -> None:
    """Tell the swapper that the files of a sub-group's moments count; it forgets those that it did not write itself."""
    weights, elements = zero.fp32_partitioned_groups_flat[number], int(zero.fp16_partitioned_groups_flat_numel[number])
    for moment in zero.optimizer.state[weights].values():
        if torch.is_tensor(moment) and moment.numel() == 0:
            moment.data = torch.empty(elements)  # of its size, so that it is taken for what is swapped
    zero.optimizer_swapper._get_param_swap_info(weights).release_memory()


def _read_universal(zero: Any, folder: Path) -> None:
    """Take every sub-group in from disk, give it this rank's part of ``folder``'s tensors, and put it out again."""
    common = torch.load(folder / "optimizer_state.pt", weights_only=False)
    zero._load_global_state_stage3(common)
    adam = common["optimizer_state_dict"]
    for group in zero.optimizer.param_groups:
        group.update(adam["param_groups"][0])
    timers: set[str] = set()
    for number, weights in enumerate(zero.fp32_partitioned_groups_flat):
        zero._prepare_sub_group(number, timers)
        weights.data.copy_(_part(zero, number, folder, "fp32"))
        moments = {kind: _part(zero, number, folder, kind) for kind in MOMENTS}
        zero.optimizer.state[weights] = {"step": adam["state"][0]["step"], **moments}
        zero._reassign_or_swap_out_partitioned_parameters(number)
        zero._release_sub_group(number, timers)


def _part(zero: Any, number: int, folder: Path, kind: str) -> torch.Tensor:
    """This rank's part of sub-group ``number``: what it has of each parameter, one after the other."""
    parameters = zero.fp16_groups[number]
    return torch.cat([zero.load_hp_checkpoint_state(folder / zero.param_names[p], kind, param=p) for p in parameters])
