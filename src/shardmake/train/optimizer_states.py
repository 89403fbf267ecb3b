"""Adapt Adam's states to the implementation that continues with them; save and restore what DeepSpeed omits.

A checkpoint may come from another implementation: DeepSpeedCPUAdam replaces torch's Adam if states are offloaded, and
torch's own is fused on GPUs only. The checkpoint brings its implementation's settings and its kind of step count.

For ZeRO-3 with its optimizer on NVMe, DeepSpeed 0.19 copies its swap files into a checkpoint. When it resumes, it
copies them back and reads the weights from them. The checkpoint does not record which file belongs to which sub-group.
DeepSpeed also ignores the ranks' optimizer files: sub-groups too small to be swapped silently restart from the base
model, and Adam's moments and step count from zero. From a universal checkpoint it reads no states at all.
"""

from pathlib import Path
from typing import Any, Final

import torch

from shardmake.checkpoint.formats.zero import MOMENTS, inner_folder, universal_folder
from shardmake.checkpoint.formats.zero_files import write_swap_ids
from shardmake.core.private_names import private

_SCALING: Final = ("loss_scaler", "dynamic_loss_scale", "overflow")
_IMPLEMENTATION: Final = ("fused", "foreach", "capturable", "differentiable")
"""Settings that choose torch's kernel and not the numbers; a load replaces them by those of the checkpoint."""


def is_swapping(engine: Any) -> bool:
    """Return True if DeepSpeed's ``engine`` keeps optimizer states on NVMe."""
    return getattr(getattr(engine, "optimizer", None), "swap_optimizer", False)


def note_sub_groups(engine: Any, checkpoint: Path) -> None:
    """Write an index of the swap files that ``engine`` copied into ``checkpoint``; only on the first rank."""
    if is_swapping(engine) and engine.global_rank == 0:
        zero = engine.optimizer
        write_swap_ids(inner_folder(checkpoint), [str(weights.ds_id) for weights in zero.fp32_partitioned_groups_flat])


def restore(engine: Any, checkpoint: Path) -> None:
    """Restore the states that DeepSpeed did not read from ``checkpoint``, and adapt those that it read.

    Every rank takes part. DeepSpeed must have loaded the checkpoint and copied the swap files back before.
    """
    if is_swapping(engine):
        engine.optimizer.checkpoint_event_prologue()
        if engine.load_universal_checkpoint():
            _read_universal(engine.optimizer, universal_folder(checkpoint) / "zero")
        else:
            _read_remaining(engine, checkpoint)
        engine.optimizer.checkpoint_event_epilogue()
    fit_optimizer(engine.optimizer.optimizer)


def _read_remaining(engine: Any, checkpoint: Path) -> None:
    zero = engine.optimizer
    file = private(engine).get_zero_ckpt_name(str(checkpoint), inner_folder(checkpoint).name)
    saved = torch.load(file, map_location="cpu", weights_only=False)["optimizer_state_dict"]
    for name in _SCALING:
        setattr(zero, name, saved[name])
    private(zero).set_fp32_optimizer_param_groups()
    zero.optimizer.load_state_dict(saved["optimizer_state_dict"])
    private(zero).clear_fp32_optimizer_param_groups()
    for number, weights in enumerate(saved["fp32_flat_groups"]):
        if private(zero).swappable_optimizer_subgroup(number):
            _leave_on_disk(zero, number)
        else:
            zero.fp32_partitioned_groups_flat[number].data.copy_(weights)
            private(zero).reassign_or_swap_out_partitioned_parameters(number)


def _leave_on_disk(zero: Any, number: int) -> None:
    """Mark a sub-group's moments as swapped out; the swapper ignores files that it did not write itself."""
    weights, elements = zero.fp32_partitioned_groups_flat[number], int(zero.fp16_partitioned_groups_flat_numel[number])
    for moment in zero.optimizer.state[weights].values():
        if torch.is_tensor(moment) and moment.numel() == 0:
            moment.data = torch.empty(elements)  # the swapper recognizes moments by their size
    private(zero.optimizer_swapper).get_param_swap_info(weights).release_memory()


def _read_universal(zero: Any, folder: Path) -> None:
    """Load this rank's part of the tensors in ``folder`` into every sub-group, and swap the sub-group out again."""
    common = torch.load(folder / "optimizer_state.pt", weights_only=False)
    private(zero).load_global_state_stage3(common)
    adam = common["optimizer_state_dict"]
    for group in zero.optimizer.param_groups:
        group.update(adam["param_groups"][0])
    timers: set[str] = set()
    for number, weights in enumerate(zero.fp32_partitioned_groups_flat):
        private(zero).prepare_sub_group(number, timers)
        weights.data.copy_(_part(zero, number, folder, "fp32"))
        moments = {kind: _part(zero, number, folder, kind) for kind in MOMENTS}
        zero.optimizer.state[weights] = {"step": adam["state"][0]["step"], **moments}
        private(zero).reassign_or_swap_out_partitioned_parameters(number)
        private(zero).release_sub_group(number, timers)


def _part(zero: Any, number: int, folder: Path, kind: str) -> torch.Tensor:
    """Return this rank's part of sub-group ``number``: its parts of all parameters, concatenated."""
    parameters = zero.fp16_groups[number]
    return torch.cat([zero.load_hp_checkpoint_state(folder / zero.param_names[p], kind, param=p) for p in parameters])


def fit_optimizer(optimizer: Any) -> None:
    """Convert settings and step counts from a checkpoint to those of ``optimizer``, a torch or DeepSpeed optimizer.

    Torch's fused kernel reads the count on the parameter's device, but a converted checkpoint leaves it on the host.
    DeepSpeed 0.19 gives all sub-groups of ZeRO-3 one counter from a universal checkpoint, which each would increment.
    """
    for group in optimizer.param_groups:
        for name, value in optimizer.defaults.items():
            group.setdefault(name, value)
        group.update({name: optimizer.defaults[name] for name in _IMPLEMENTATION if name in optimizer.defaults})
    for parameter, state in optimizer.state.items():
        if "step" in state:
            state["step"] = _make_counter(optimizer, parameter, state["step"])


def _make_counter(optimizer: Any, parameter: torch.Tensor, step: Any) -> Any:
    """Return a separate counter with the value ``step``, of the type and on the device that ``optimizer`` uses."""
    if isinstance(optimizer, torch.optim.Adam):
        on_device = optimizer.defaults["fused"] or optimizer.defaults["capturable"]
        device = parameter.device if on_device else torch.device("cpu")
        return torch.as_tensor(step).to(device, torch.float32, copy=True)
    if type(optimizer).__name__ == "DeepSpeedCPUAdam":
        return int(step)
    return step.clone() if torch.is_tensor(step) else step
