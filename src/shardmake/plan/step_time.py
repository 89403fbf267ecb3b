"""Seconds per optimizer step: compute, recomputation, communication, offload traffic, CPU optimizer.

This is a roofline: each part is bytes or FLOP over a rate, times the share of it that real runs reach. It ranks
candidates and is not a prediction of time.
"""

from shardmake.core.units import GB
from shardmake.memory.hardware import Hardware
from shardmake.memory.scenario import BYTES, Scenario

MODEL_FLOPS_SHARE = 0.5  # of dense peak reached by matmul-bound training (torchtitan's and MosaicML's tables: 0.4-0.55)
LINK_SHARE = 0.7  # of the nominal link that NCCL's ring reaches (nccl-tests)
EXPOSED = 0.4  # part of ZeRO's and FSDP's communication that does not hide behind compute
CPU_ADAM_RATE = 0.5 * 10**9  # elements per second of a node's CPU Adam (DeepSpeed: 1 s for 1 B on two sockets, halved)
NVME_RATE = 3 * GB  # read or write, one good drive
SMALL_BATCH = 256  # tokens at which kernels reach half their speed


def step_time(scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of one optimizer step of ``scenario`` on ``hardware``."""
    forward = _forward_seconds(scenario, hardware) * scenario.accumulation
    backward = forward * (2 if scenario.method == "full" else 1.1)
    recomputation = forward if scenario.checkpointing else 0.0
    communication, offload = _communication(scenario, hardware), _offload(scenario, hardware)
    return forward + backward + recomputation + communication + offload + _optimizer(scenario, hardware)


def forward_flops(scenario: Scenario) -> float:
    """Return the FLOP of one forward pass: 2 per weight and token, and attention's 4 s h per token and layer."""
    model = scenario.model
    layers = len(model.blocks)
    attention = 4 * layers * model.hidden_size * scenario.sequence_length / 2
    lookup = model.embedding if not model.tied and model.embedding else 0
    return scenario.tokens * (2 * (model.parameters - lookup // 2) + attention)


def _forward_seconds(scenario: Scenario, hardware: Hardware) -> float:
    share = MODEL_FLOPS_SHARE * scenario.tokens / (scenario.tokens + SMALL_BATCH)
    return forward_flops(scenario) / (hardware.flops(scenario.precision) * share)


def _communication(scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of ring collectives: an all-reduce moves two copies, an all-gather or reduce-scatter one."""
    ranks = scenario.world_size
    if ranks == 1:
        return 0.0
    link = hardware.intra_node
    if scenario.nodes > 1:
        # every rank of a node shares its network card or has its own share of it
        link = min(link, hardware.inter_node)
    rate = link * LINK_SHARE
    part = (ranks - 1) / ranks
    gradient_bytes = (4 if scenario.spec.is_ddp else scenario.compute) * scenario.split.trainable
    weights = scenario.compute * scenario.split.total
    passes = scenario.accumulation * (3 if scenario.checkpointing else 2)
    if not scenario.gathers_parameters:
        rounds = scenario.accumulation if scenario.zero_stage == 2 else 1
        gathered = scenario.compute * scenario.split.trainable if scenario.zero_stage else gradient_bytes
        return part * (rounds * gradient_bytes + gathered) / rate * EXPOSED
    if not scenario.spec.reshard_after_forward:
        passes = scenario.accumulation
    if scenario.spec.hybrid:
        rate = hardware.intra_node * LINK_SHARE
    moved = passes * weights + scenario.accumulation * gradient_bytes
    return part * moved / rate * EXPOSED


def _offload(scenario: Scenario, hardware: Hardware) -> float:
    if not scenario.offloads_optimizer or hardware.is_cpu:
        return 0.0
    rate = hardware.accelerator.host_link * GB
    part = scenario.split.trainable / scenario.world_size
    transfers = 1 if scenario.zero_stage == 1 else scenario.accumulation  # of gradients to the host
    moved = part * (scenario.compute * transfers + scenario.compute)
    if scenario.offloads_parameters:
        moved += scenario.split.total / scenario.world_size * scenario.compute * 2 * scenario.accumulation
    seconds = moved / rate
    if scenario.spec.uses_nvme:
        per_node = scenario.split.trainable / scenario.nodes
        seconds += per_node * 2 * 12 / NVME_RATE + scenario.accumulation * 2 * per_node * scenario.compute / NVME_RATE
    return seconds


def _optimizer(scenario: Scenario, hardware: Hardware) -> float:
    trained = scenario.split.trainable
    part = trained if scenario.spec.is_ddp else trained / scenario.shards
    if scenario.offloads_optimizer or hardware.is_cpu:
        return part * scenario.ranks_per_node / CPU_ADAM_RATE
    return part * (16 + 2 * BYTES[scenario.precision]) / (hardware.accelerator.bandwidth * GB * 0.8)
