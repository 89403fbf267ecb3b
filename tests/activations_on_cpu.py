"""Let ranks on CPUs copy saved activations as on a GPU, for tests only; a rank's program must import this first.

transformers and torch copy them to pinned memory, which needs a GPU. Here the copies are not pinned, and the first one
of a rank is logged.
"""

import functools
from importlib import import_module
from typing import Any

import torch

COPIED = "A layer's input was copied to the host."


@functools.cache
def _log_once() -> None:
    print(COPIED, flush=True)


class SaveOnCpu(torch.autograd.graph.saved_tensors_hooks):
    """`torch.autograd.graph.save_on_cpu` without pinned memory."""

    def __init__(self, **_: Any) -> None:
        super().__init__(self._pack, torch.clone)

    @staticmethod
    def _pack(tensor: torch.Tensor) -> torch.Tensor:
        _log_once()
        return tensor.detach().clone()


for module in ("transformers.modeling_utils", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"):
    vars(import_module(module))["save_on_cpu"] = SaveOnCpu
