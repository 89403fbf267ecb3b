"""DeepSpeed's own estimate of model states, as it prints it, for the parameter counts of a config.json.

It counts weights, gradients and Adam's states, and for ZeRO-3 the largest layer: no activations, logits or buffers. It
is printed for comparison with `shardmake estimate`.
"""

import contextlib
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator

from shardmake.core.units import plural
from shardmake.memory.model import Model


def largest_layer(model: Model) -> int:
    """Return the elements of the module with the most parameters of its own, which DeepSpeed calls a layer."""
    sizes: Counter[str] = Counter()
    for tensor in model.tensors:
        sizes[tensor.module] += tensor.numel
    return max(sizes.values())


def deepspeed_table(model: Model, nodes: int, gpus_per_node: int) -> str:
    """Return DeepSpeed's rows for ZeRO-2 and ZeRO-3; its GB are GiB."""
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to standard output when it is imported
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold as print_zero3
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_cold as print_zero2
    total, largest = model.parameters, largest_layer(model)
    return "\n".join(
        [
            "DeepSpeed's estimate of params, optim states and gradients (no activations, logits or buffers):",
            f"HW: {plural(nodes, 'node')}, {plural(gpus_per_node, 'GPU')} per node.",
            f"SW: {total // 10**6}M total params, {largest // 10**6}M largest layer params.",
            "  per CPU  |  per GPU |   Options",
            *_rows("ZeRO-2", print_zero2, total, gpus_per_node, nodes),
            *_rows("ZeRO-3", print_zero3, total, largest, gpus_per_node, nodes),
        ]
    )


def _rows(stage: str, show: Callable[..., None], *counts: int) -> Iterator[str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        show(*counts)
    for row in (line for line in printed.getvalue().splitlines() if "GB |" in line):
        sizes, _, options = row.rpartition("| ")
        yield f"{sizes}| {stage}: {options.replace('OffloadDeviceEnum.cpu', 'cpu ')}"  # its text from Python 3.12 on
