"""Seconds per optimizer step that offloading adds: copies over the link, passes over host memory, the CPU's Adam.

What is copied when is read from DeepSpeed's ``stage_1_and_2.py`` and ``stage3.py`` and from FSDP2's ``_fsdp_param.py``
and ``_fsdp_param_group.py``. The link to a GPU and the memory of a node bound each of them; the ranks of a node share
the memory. No part of it hides behind compute: the libraries wait for the copies of a micro batch before the next one.
"""

from shardmake.core.units import GB
from shardmake.memory.hardware import Hardware
from shardmake.memory.scenario import Scenario
from shardmake.memory.states import keeps_flat_gradients, trained_bytes

_THREAD_RATE = 5 * GB
"""Host memory that a rank reads and writes with one thread; with more, it grows with their root.

One rate explains Falcon-7B under DeepSpeed with one thread a rank, 1.24B weights under FSDP with 16, and Qwen2.5 under
DeepSpeed with 64 (``benchmarks/step_time_rows.csv``) within 12 %. `plan` offloads only where nothing else fits until
ten such pairs are within 25 %.
"""
_NODE_RATE = 100 * GB
"""Of all ranks of a node: the most that a source shows is 80 GB/s on 128 cores."""
_PAGEABLE = 7 * GB
"""Rate of copies from and to memory that is not pinned: 7.1 GB/s to, 12.1 from one H100."""
_ADAM_BYTES = 28
"""Of an fp32 weight, its gradient and both moments, read, and three of them written."""
NVME_RATE = 3 * GB  # read or write, one good drive


def _host_rate(hardware: Hardware, ranks: int) -> float:
    """Return the bytes per second that the threads of one of ``ranks`` of a node read and write."""
    return min(_THREAD_RATE * (hardware.cpus_per_node / ranks) ** 0.5, _NODE_RATE / ranks)


def offload_time(scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds that offload adds to an optimizer step; 0 without it."""
    if not (scenario.spec.offload_optimizer or scenario.spec.offload_param):
        return 0.0
    memory = _host_rate(hardware, scenario.ranks_per_node)
    link = min(hardware.accelerator.host_link * GB, memory)
    part = scenario.split.trainable / scenario.shards
    if scenario.spec.is_fsdp:
        pinned, pageable, host = _fsdp(scenario)
    else:
        pinned, pageable, host = _deepspeed(scenario)
    seconds = pinned / link + part * (pageable / min(_PAGEABLE, memory) + host / memory)
    return seconds + _swaps(scenario)


def gathers(scenario: Scenario) -> int:
    """Return how often a micro batch gathers the weights: for forward and for backward pass.

    Under ZeRO-3 recomputation gathers them again; FSDP2 recomputes a layer after it has gathered it for the backward
    pass.
    """
    if not scenario.spec.reshard_after_forward:
        return 1
    return 3 if scenario.checkpointing and not scenario.spec.is_fsdp else 2


def _fsdp(scenario: Scenario) -> tuple[float, float, float]:
    """Return pinned bytes of a rank, and per weight that it trains: unpinned bytes, and bytes of passes on the host.

    Each gather copies the sharded weights as they are held and casts them on the GPU. The gradients of the first micro
    batch come back pinned; those of later ones do not, because the host waits for them to add them.
    """
    held, more = trained_bytes(scenario), scenario.accumulation - 1
    split, shards = scenario.split, scenario.shards
    frozen = scenario.frozen * split.frozen + split.quantized / 2
    pinned = (
        scenario.accumulation * gathers(scenario) * (held * split.trainable + frozen) + held * split.trainable
    ) / shards
    norm_and_clip = 3 * held
    return pinned, more * held, more * 3 * held + norm_and_clip + _ADAM_BYTES


def _deepspeed(scenario: Scenario) -> tuple[float, float, float]:
    """Return the same for DeepSpeed, whose buffers are pinned.

    Gradients of a micro batch go to the host, and back to the GPU where later ones are added to them; at the last one
    they go there in fp32. The host clips them and converts the new weights to the compute type.
    """
    split, shards, passes = scenario.split, scenario.shards, scenario.accumulation
    pinned, host = float(scenario.compute * split.trainable), 0.0
    if scenario.spec.offload_param:
        held = scenario.compute * (split.trainable + split.frozen) + split.quantized / 2
        pinned += passes * gathers(scenario) * held
    if scenario.spec.offload_optimizer:
        summed = 0 if keeps_flat_gradients(scenario) else passes if scenario.spec.zero_stage == 3 else passes - 1
        pinned += split.trainable * (2 * summed * scenario.gradient + 4)
        clip, convert = 8, 4 + scenario.compute
        host = clip + _ADAM_BYTES + convert
    return pinned / shards, 0.0, host


def _swaps(scenario: Scenario) -> float:
    """Return the seconds that ZeRO-Infinity reads and writes states and weights on a node's NVMe."""
    if not scenario.spec.uses_nvme:
        return 0.0
    per_node = scenario.split.trainable / scenario.nodes
    return (2 * 12 + scenario.accumulation * 2 * scenario.compute) * per_node / NVME_RATE
