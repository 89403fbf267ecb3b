"""Muon for the matrices of the layers and AdamW for all other weights, as one optimizer."""

from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from shardmake.core.private_names import private, private_module

_TORCH: Final = private(private_module("muon"))
_MOMENTUM: Final = 0.95
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_STEPS: Final = 5
_EPSILON: Final = 1e-7


class MuonWithAdamW(torch.optim.AdamW):
    """AdamW whose groups with ``orthogonal: True`` take the update of `torch.optim.Muon`, with its defaults.

    ``match_rms_adamw`` gives a matrix an update of the size of AdamW's, so that one learning rate serves both.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.defaults["orthogonal"] = False
        for group in self.param_groups:
            group.setdefault("orthogonal", False)
        private(self).step_supports_amp_scaling = False  # a scaler would leave inf in gradients to the fused kernel

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all weights; ``closure`` is AdamW's."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["orthogonal"]]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            for weight in group["params"] if group["orthogonal"] else ():
                if (gradient := weight.grad) is not None:
                    self._update_matrix(weight, gradient, group["lr"], group["weight_decay"])
        return loss

    def _update_matrix(self, weight: torch.Tensor, gradient: torch.Tensor, rate: float, decay: float) -> None:
        """Update a matrix [rows, columns] in place; of one that FSDP2 shards, every rank computes the whole update."""
        state = self.state[weight]
        if not state:  # AdamW does not load a state without a step
            state.update(step=torch.zeros(()), momentum_buffer=torch.zeros_like(gradient))
        momentum = state["momentum_buffer"]
        state["step"] += 1
        momentum.lerp_(gradient, 1 - _MOMENTUM)
        update = gradient.lerp(momentum, _MOMENTUM).bfloat16()
        if isinstance(update, DTensor):
            update = update.full_tensor()
        update = _TORCH.zeropower_via_newtonschulz(update, _COEFFICIENTS, _STEPS, _EPSILON)
        if isinstance(weight, DTensor):
            update = distribute_tensor(update, weight.device_mesh, weight.placements, src_data_rank=None)
        weight.mul_(1 - rate * decay)
        weight.add_(update, alpha=-_TORCH.adjust_lr(rate, "match_rms_adamw", weight.shape))
