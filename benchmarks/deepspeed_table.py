"""DeepSpeed's own estimate of ZeRO-3's model states: what ``estimate_zero3_model_states_mem_needs_all_cold`` prints.

It counts weights, gradients and Adam's states, and one layer: no activations, no logits, no buffers. It is here for
comparison. Source: ``deepspeed/runtime/zero/stage3.py``.
"""

from dataclasses import dataclass

from shardmake.core.units import GIB

SPARE = 1.5  # DeepSpeed's additional_buffer_factor on host RAM


@dataclass(frozen=True)
class Needs:
    """Bytes by DeepSpeed's formula for one combination of options."""

    offload_param: bool
    offload_optimizer: bool
    zero_init: bool
    host: float
    gpu: float


def needs(total: int, largest: int, nodes: int, gpus_per_node: int) -> list[Needs]:
    """The table's rows: ``total`` parameters, ``largest`` of one module's own."""
    rows = []
    for optimizer, param in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            gpu = 4 * largest + _gpu_states(total, nodes * gpus_per_node, optimizer, param)
            host = SPARE * _host(total, largest, nodes, gpus_per_node, optimizer, param, zero_init)
            rows.append(Needs(param, optimizer, zero_init, host, gpu))
    return rows


def _gpu_states(total: int, ranks: int, optimizer: bool, param: bool) -> int:
    if optimizer:
        return 0 if param else int(2 * total / ranks)
    return int(18 * total / ranks)


def _host(total: int, largest: int, nodes: int, gpus: int, optimizer: bool, param: bool, zero_init: bool) -> float:
    if not optimizer:
        return 4 * gpus * (largest if zero_init else total)
    held = (18 if param else 16) / nodes
    return total * (held if zero_init else max(4 * gpus, held))


def table(total: int, largest: int, nodes: int, gpus_per_node: int) -> str:
    """The text that DeepSpeed prints; its GB are GiB."""
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {_plural(nodes, 'node')}, {_plural(gpus_per_node, 'GPU')} per node.",
        f"SW: Model with {int(total / 1e6)}M total params, {int(largest / 1e6)}M largest layer params.",
        "  per CPU  |  per GPU |   Options",
    ]
    lines += [_line(row) for row in needs(total, largest, nodes, gpus_per_node)]
    return "\n".join(lines)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count > 1 else ''}"


def _line(row: Needs) -> str:
    param, optimizer = (
        f"{'cpu' if offloaded else 'none':4}" for offloaded in (row.offload_param, row.offload_optimizer)
    )
    options = f"offload_param={param}, offload_optimizer={optimizer}, zero_init={int(row.zero_init)}"
    return f" {row.host / GIB:7.2f}GB | {row.gpu / GIB:6.2f}GB | {options}"
