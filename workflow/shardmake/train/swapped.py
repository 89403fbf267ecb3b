"""ZeRO-3 with its optimizer on NVMe: what a checkpoint lacks of it, and what DeepSpeed does not read back.

DeepSpeed 0.19 copies its swap files into a checkpoint, and when it resumes it copies them back and takes the weights
from them. Nothing says which file is which sub-group's. And of the ranks' optimizer files it reads nothing: sub-groups
too small to be swapped go on from the base model, Adam's moments and its step count from zero, all without a word.
"""

from pathlib import Path
from typing import Any

import torch

from shardmake.consolidate.deepspeed import inner_folder
from shardmake.consolidate.swapped import write_index

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
    zero = engine.optimizer
    file = engine._get_zero_ckpt_name(str(checkpoint), inner_folder(checkpoint).name)
    saved = torch.load(file, map_location="cpu", weights_only=False)["optimizer_state_dict"]
    for name in _SCALING:
        setattr(zero, name, saved[name])
    zero._set_fp32_optimizer_param_groups()
    zero.optimizer.load_state_dict(saved["optimizer_state_dict"])
    zero._clear_fp32_optimizer_param_groups()
    zero.checkpoint_event_prologue()
    for number, weights in enumerate(saved["fp32_flat_groups"]):
        if zero._swappable_optimizer_subgroup(number):
            _leave_on_disk(zero, number)
        else:
            zero.fp32_partitioned_groups_flat[number].data.copy_(weights)
            zero._reassign_or_swap_out_partitioned_parameters(number)
    zero.checkpoint_event_epilogue()


def _leave_on_disk(zero: Any, number: int) -> None:
    """Tell the swapper that the files of a sub-group's moments count; it forgets those that it did not write itself."""
    weights, elements = zero.fp32_partitioned_groups_flat[number], int(zero.fp16_partitioned_groups_flat_numel[number])
    for moment in zero.optimizer.state[weights].values():
        if torch.is_tensor(moment) and moment.numel() == 0:
            moment.data = torch.empty(elements)  # of its size, so that it is taken for what is swapped
    zero.optimizer_swapper._get_param_swap_info(weights).release_memory()
