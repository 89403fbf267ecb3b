"""Make FSDP run on the CPU over gloo, for tests only; a rank's program must import this first, or is this file.

Accelerate enables FSDP only if the distributed type is MULTI_<accelerator>. On the CPU the type is MULTI_CPU, and
Accelerate silently ignores FSDP. FSDP's offload also pins memory, which needs a GPU. FSDP1 refuses the index in the device
"cpu:0", which Accelerate passes, and Accelerate refuses to fill its weights on a CPU.
"""

import os
from functools import wraps
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, dataclasses
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, _init_utils


def _is_fsdp_requested(arguments: dict[str, Any]) -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP") == "true" or arguments.get("fsdp_plugin") is not None


def _pretend_gpu() -> None:
    if PartialState._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


_partial, _full, _fsdp1 = PartialState.__init__, AcceleratorState.__init__, FullyShardedDataParallel.__init__
_offload, _plugin = FullyShardedDataParallelPlugin.set_cpu_offload, FullyShardedDataParallelPlugin.__post_init__


@wraps(_partial)
def _partial_state(self: Any, *args: Any, **kwargs: Any) -> None:
    _partial(self, *args, **kwargs)
    if _is_fsdp_requested(kwargs):
        _pretend_gpu()


@wraps(_full)
def _accelerator_state(self: Any, *args: Any, **kwargs: Any) -> None:
    if _is_fsdp_requested(kwargs):
        _pretend_gpu()
    _full(self, *args, **kwargs)


@wraps(_offload)
def _set_cpu_offload(self: Any) -> None:
    _offload(self)
    if isinstance(self.cpu_offload, CPUOffloadPolicy):
        self.cpu_offload = CPUOffloadPolicy(pin_memory=False)


@wraps(_fsdp1)
def _wrap_with_fsdp1(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    if str(kwargs.get("device_id", "")).startswith("cpu"):
        kwargs["device_id"] = torch.device("cpu")
        _init_utils._check_module_states_for_sync_module_states = lambda module_states: None  # it requires a GPU
    _fsdp1(self, module, *args, **kwargs)


@wraps(_plugin)
def _make_plugin(self: Any) -> None:
    """Let FSDP1 fill weights on the CPU; Accelerate looks for an accelerator's number."""
    with (
        mock.patch.object(dataclasses, "is_xpu_available", lambda *_: True),
        mock.patch.object(torch.xpu, "current_device", lambda: "cpu"),
    ):
        _plugin(self)


def undo() -> None:
    """Let Accelerate ignore FSDP on the CPU again."""
    PartialState.__init__, AcceleratorState.__init__ = _partial, _full


PartialState.__init__ = _partial_state
AcceleratorState.__init__ = _accelerator_state
FullyShardedDataParallelPlugin.set_cpu_offload = _set_cpu_offload
FullyShardedDataParallelPlugin.__post_init__ = _make_plugin
FullyShardedDataParallel.__init__ = _wrap_with_fsdp1  # type: ignore[method-assign]

if __name__ == "__main__":
    from shardmake.train.__main__ import main

    main()
