"""DeepSpeed's own estimate of model states, from its functions and the parameter counts of a config.json.

It counts weights, gradients and Adam's states, and for ZeRO-3 the largest layer: no activations, logits or buffers. It
is printed for comparison with `shardmake estimate`.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product

from shardmake.core.units import GIB, plural
from shardmake.memory.model import Model


def largest_layer(model: Model) -> int:
    """Return the elements of the module with the most parameters of its own, which DeepSpeed calls a layer."""
    sizes: Counter[str] = Counter()
    for tensor in model.tensors:
        sizes[tensor.module] += tensor.numel
    return max(sizes.values())


def deepspeed_table(model: Model, nodes: int, gpus_per_node: int) -> str:
    """Return DeepSpeed's rows for ZeRO-2 and ZeRO-3 as it prints them; its GB are GiB.

    Source: ``estimate_zero2_model_states_mem_needs`` and ``estimate_zero3_model_states_mem_needs`` of DeepSpeed.
    """
    total, largest = model.parameters, largest_layer(model)
    return "\n".join(
        [
            "DeepSpeed's estimate of params, optim states and gradients (no activations, logits or buffers):",
            f"HW: {plural(nodes, 'node')}, {plural(gpus_per_node, 'GPU')} per node.",
            f"SW: {total // 10**6}M total params, {largest // 10**6}M largest layer params.",
            "  per CPU  |  per GPU |   Options",
            *_zero2_rows(total, nodes, gpus_per_node),
            *_zero3_rows(total, largest, nodes, gpus_per_node),
        ]
    )


def _zero2_rows(total: int, nodes: int, gpus_per_node: int) -> Iterator[str]:
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to standard output when it is imported
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
    for offload in (True, False):
        host, gpu = estimate_zero2_model_states_mem_needs(total, gpus_per_node, nodes, cpu_offload=offload)
        yield _row(host, gpu, f"ZeRO-2: offload_optimizer={_device(offload)}")


def _zero3_rows(total: int, largest: int, nodes: int, gpus_per_node: int) -> Iterator[str]:
    with contextlib.redirect_stdout(sys.stderr):
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    for (optimizer, params), zero_init in product(((True, True), (True, False), (False, False)), (True, False)):
        host, gpu, _ = estimate_zero3_model_states_mem_needs(
            total, largest, gpus_per_node, nodes, cpu_offload=optimizer, cpu_offload_params=params, zero_init=zero_init
        )
        options = f"offload_param={_device(params)}, offload_optimizer={_device(optimizer)}, zero_init={int(zero_init)}"
        yield _row(host, gpu, f"ZeRO-3: {options}")


def _device(offload: bool) -> str:
    return f"{'cpu' if offload else 'none':4}"


def _row(host: int, gpu: int, options: str) -> str:
    return f" {host / GIB:7.2f}GB | {gpu / GIB:6.2f}GB | {options}"
