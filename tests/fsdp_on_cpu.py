"""Test-only: lets FSDP2 run on the CPU over gloo. Import it first in a rank's program.

Accelerate turns FSDP on only where the distributed type is MULTI_<accelerator>; on the CPU it is MULTI_CPU, and FSDP
would be ignored without a word. And FSDP's offload pins memory, which needs a GPU to pin it for.
"""

import os
from functools import wraps
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy


def _wants_fsdp(arguments: dict[str, Any]) -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP") == "true" or arguments.get("fsdp_plugin") is not None


def _call_it_a_gpu() -> None:
    if PartialState._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


_partial, _whole, _offload = (
    PartialState.__init__,
    AcceleratorState.__init__,
    FullyShardedDataParallelPlugin.set_cpu_offload,
)


@wraps(_partial)
def _partial_state(self: Any, *args: Any, **kwargs: Any) -> None:
    _partial(self, *args, **kwargs)
    if _wants_fsdp(kwargs):
        _call_it_a_gpu()


@wraps(_whole)
def _accelerator_state(self: Any, *args: Any, **kwargs: Any) -> None:
    if _wants_fsdp(kwargs):
        _call_it_a_gpu()
    _whole(self, *args, **kwargs)


@wraps(_offload)
def _set_cpu_offload(self: Any) -> None:
    _offload(self)
    if isinstance(self.cpu_offload, CPUOffloadPolicy):
        self.cpu_offload = CPUOffloadPolicy(pin_memory=False)


PartialState.__init__ = _partial_state
AcceleratorState.__init__ = _accelerator_state
FullyShardedDataParallelPlugin.set_cpu_offload = _set_cpu_offload
