"""Adam's states after DeepSpeed has read them: made to fit the optimizer that goes on with them."""

from typing import Any

import torch


def fit_states(optimizer: Any) -> None:
    """Make settings and step counts that another kind of Adam may have written fit ``optimizer``.

    Where states are offloaded, DeepSpeedCPUAdam stands in the place of torch's Adam: each has settings that the other
    does not write, and the one counts in numbers, the other in tensors. And DeepSpeed 0.19 gives all sub-groups of
    ZeRO-3 the same counter when it reads a universal checkpoint, and each of them counts it up in every step.
    """
    for group in optimizer.param_groups:
        for name, value in optimizer.defaults.items():
            group.setdefault(name, value)
    for parameter, state in optimizer.state.items():
        if "step" in state:
            state["step"] = _counter(optimizer, parameter, state["step"])


def _counter(optimizer: Any, parameter: torch.Tensor, step: Any) -> Any:
    """``step`` as ``optimizer`` counts, apart from every other."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if isinstance(optimizer, DeepSpeedCPUAdam):
        return int(step)
    if isinstance(optimizer, torch.optim.Adam) and not torch.is_tensor(step):
        on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        return torch.tensor(float(step), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    return step.clone() if torch.is_tensor(step) else step
