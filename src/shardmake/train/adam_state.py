"""Adapt Adam's states, as DeepSpeed has read them, to the optimizer that continues with them."""

from typing import Any

import torch


def fit_states(optimizer: Any) -> None:
    """Convert settings and step counts that another Adam implementation may have written to those of ``optimizer``.

    With offloaded states, DeepSpeedCPUAdam replaces torch's Adam. Each has settings that the other does not write, and
    one counts steps in numbers, the other in tensors. In addition, DeepSpeed 0.19 gives all sub-groups of ZeRO-3 one
    shared counter when it reads a universal checkpoint, and each sub-group increments it in every step.
    """
    for group in optimizer.param_groups:
        for name, value in optimizer.defaults.items():
            group.setdefault(name, value)
    for parameter, state in optimizer.state.items():
        if "step" in state:
            state["step"] = _make_counter(optimizer, parameter, state["step"])


def _make_counter(optimizer: Any, parameter: torch.Tensor, step: Any) -> Any:
    """Return a separate counter with the value ``step``, of the type that ``optimizer`` uses."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if isinstance(optimizer, DeepSpeedCPUAdam):
        return int(step)
    if isinstance(optimizer, torch.optim.Adam) and not torch.is_tensor(step):
        on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        return torch.tensor(float(step), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    return step.clone() if torch.is_tensor(step) else step
