"""Adapt Adam's states to the implementation of Adam that continues with them.

A checkpoint may come from another implementation: DeepSpeedCPUAdam replaces torch's Adam if states are offloaded, and
torch's own is fused on GPUs only. The checkpoint brings its implementation's settings and its kind of step count.
"""

from typing import Any, Final

import torch

_IMPLEMENTATION: Final = ("fused", "foreach", "capturable", "differentiable")
"""Settings that choose torch's kernel and not the numbers; a load replaces them by those of the checkpoint."""


def fit_optimizer(optimizer: Any) -> None:
    """Convert settings and step counts from a checkpoint to those of ``optimizer``, a torch or DeepSpeed optimizer.

    Each Adam has settings that the other does not write, and one counts steps in numbers, the other in tensors. Torch's
    fused kernel reads the count on the parameter's device, but a converted checkpoint leaves it on the host. In
    addition, DeepSpeed 0.19 gives all sub-groups of ZeRO-3 one shared counter when it reads a universal checkpoint, and
    each sub-group increments it in every step.
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
