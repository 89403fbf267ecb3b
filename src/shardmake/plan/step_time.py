"""Seconds per optimizer step: compute, recomputation, communication, offload traffic, CPU optimizer.

This is a roofline: each part is bytes or FLOP over a rate, times the share of the rate that real runs reach. The
shares are fitted to 71 published throughputs of one source; `python -m benchmarks.step_time_accuracy` compares them
with these and with other sources. Those of CPUs are fitted to the trainings of `python -m benchmarks.step_time_cpu`.
"""

from dataclasses import dataclass

from shardmake.config.accelerators import Accelerator
from shardmake.core.units import GB
from shardmake.memory.decoder import layer_input
from shardmake.memory.hardware import Hardware
from shardmake.memory.model import matrix_weights
from shardmake.memory.scenario import BYTES, Scenario
from shardmake.memory.states import keeps_flat_gradients


@dataclass(frozen=True)
class Shares:
    """The parts of the dense peak that kernels reach for a wide model and a large micro batch."""

    matmul: float
    attention: float
    """Of causal attention that skips the upper half (flash)."""


# Fitted to MosaicML's tables of A100 and H100 runs (llm-foundry, scripts/train/benchmarking). H100 runs reach a smaller
# share of a higher peak. Older and consumer GPUs are taken as A100, newer ones as H100: no measurement was available.
_HOPPER = 9.0
_SHARES = {"cpu": Shares(0.86, 0.86), "ampere": Shares(0.91, 0.35), "hopper": Shares(0.73, 0.19)}
_HALF_WIDTH = 1100
"""Hidden size at which matrix products on a GPU reach half their share."""
_HALF_TOKENS = {"cpu": 64, "ampere": 730, "hopper": 730}
"""Tokens of a micro batch at which kernels reach half their share."""
_MASKED_ATTENTION = 0.25
"""Relative rate of attention with a dense mask, which PyTorch runs without flash kernels; it skips nothing."""
LINK_SHARE = 0.7  # of the nominal link that NCCL's ring reaches (nccl-tests)
EXPOSED = 0.57  # part of communication that does not hide behind compute, fitted with the shares
_DEEPSPEED_ON_CPU = 0.18  # seconds of a step of DeepSpeed on CPUs that are neither compute nor communication
CPU_ADAM_RATE = 2 * 10**9  # elements per second of a node's CPU Adam (DeepSpeed PR 7474: 3B in less than 2.4 s)
NVME_RATE = 3 * GB  # read or write, one good drive


def step_time(scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of one optimizer step of ``scenario`` on ``hardware``."""
    compute = _compute(scenario, hardware)
    communication = _collectives(scenario, hardware) + _exchanges(scenario, hardware)
    within_layers = _tensor_parallel(scenario, hardware)
    if hardware.is_cpu:  # the cores that compute are those that communicate
        own = _DEEPSPEED_ON_CPU if scenario.zero_stage else 0.0
        return compute + communication + within_layers + own + _optimizer(scenario, hardware)
    # Communication hides behind compute in part, and never takes less than the links need.
    work = max(compute + EXPOSED * communication, communication)
    host = _offload(scenario, hardware) + _activation_transfers(scenario, hardware)
    return work + within_layers + host + _optimizer(scenario, hardware)


def _generation(accelerator: Accelerator) -> str:
    return "cpu" if accelerator.is_cpu else "hopper" if accelerator.capability >= _HOPPER else "ampere"


def _compute(scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of all forward and backward passes of one step, with recomputation of the layers.

    The backward pass has two matrix products for each one of the forward pass, or one where the weights are frozen,
    and two and a half times the work in attention.
    """
    blocks, head, attention = (seconds * scenario.accumulation for seconds in _forward(scenario, hardware))
    backward = 1.1 if scenario.method_spec.has_adapters else 2.0
    again = blocks + attention if scenario.checkpointing else 0.0
    extra = scenario.extra_forwards * (blocks + head + attention)
    return (1 + backward) * (blocks + head) + 3.5 * attention + again + extra


def _forward(scenario: Scenario, hardware: Hardware) -> tuple[float, float, float]:
    """Return the seconds of one forward pass in matrix products of the layers, in the head, and in attention."""
    model, tokens, generation = scenario.model, scenario.tokens, _generation(hardware.accelerator)
    filled = tokens / (tokens + _HALF_TOKENS[generation])
    wide = 1.0 if hardware.is_cpu else model.hidden_size / (model.hidden_size + _HALF_WIDTH)
    peak = hardware.flops(scenario.precision, tf32=scenario.tf32) * filled
    head = model.head
    matmul = peak * _SHARES[generation].matmul * wide
    width = model.decoder.a * model.decoder.d if model.decoder else model.hidden_size
    attention = 4 * tokens * len(model.blocks) * width * scenario.sequence_length / 2
    if scenario.masked or scenario.attention == "eager":
        attention *= 2 / _MASKED_ATTENTION
    return (
        2 * tokens * (matrix_weights(model) - head) / matmul,
        2 * tokens * head / matmul,
        attention / (peak * _SHARES[generation].attention),
    )


def _exchanges(scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of Ulysses' all-to-alls, whose groups are within a node.

    Each layer exchanges queries, keys, values and the output. The backward pass exchanges their gradients. A rank keeps
    one part of its numbers and sends the others.
    """
    size, model = scenario.sequence_parallel, scenario.model
    if size == 1 or model.decoder is None:
        return 0.0
    shape = model.decoder
    passes = scenario.accumulation * (3 if scenario.checkpointing else 2)
    numbers = 2 * (shape.a + shape.k) * shape.d * scenario.tokens * shape.layers * passes
    return (size - 1) / size * numbers * scenario.compute / (hardware.intra_node * LINK_SHARE)


def _tensor_parallel(scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of AutoTP's collectives, whose groups are within a node; each layer waits for its own.

    Of hidden states, the forward pass reduces the outputs of attention and MLP, a recomputation the first of them, and
    the backward pass the gradient of the input of each of the five matrices that are divided by rows, and of the head.
    The ranks gather logits, or reduce the output of an embedding that is tied to the head
    (``deepspeed/module_inject/layers.py``). A tied embedding that scales its output is whole on every rank, and so is
    the head (`families.part_of`).
    """
    size, model = scenario.tensor_parallel, scenario.model
    if size == 1:
        return 0.0
    whole = model.tied and model.decoder is not None and model.decoder.scaled_embedding
    outside = 0 if whole else 2 if model.tied else 1
    reductions = len(model.blocks) * (8 if scenario.checkpointing else 7) + outside
    numbers = 2 * reductions * model.hidden_size + (0 if model.tied else model.vocab_size)
    moved = (size - 1) / size * scenario.accumulation * scenario.tokens * numbers * scenario.compute
    return moved / (hardware.intra_node * LINK_SHARE)


def _collectives(scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of ring collectives: an all-reduce moves two copies, an all-gather or reduce-scatter one.

    All ranks of a node share its network, so a collective over several nodes moves at the rate of a node, and those of
    several tensor-parallel parts at that rate together.
    """
    ranks = scenario.world_size // scenario.tensor_parallel
    if ranks == 1:
        return 0.0
    intra = hardware.intra_node * LINK_SHARE
    inter = hardware.inter_node * LINK_SHARE / scenario.tensor_parallel
    rate = min(intra, inter) if scenario.nodes > 1 else intra
    gradient_bytes = (4 if scenario.spec.is_ddp else scenario.gradient) * scenario.split.trainable
    if not scenario.gathers_parameters:
        rounds = scenario.accumulation if scenario.zero_stage == 2 else 1
        gathered = scenario.compute * scenario.split.trainable if scenario.zero_stage else gradient_bytes
        return (ranks - 1) / ranks * (rounds * gradient_bytes + gathered) / rate
    weights = scenario.compute * scenario.split.total
    moved = scenario.accumulation * (_gathers(scenario) * weights + gradient_bytes)
    within, nodes = scenario.ranks_per_node, scenario.nodes
    if scenario.spec.hpz:  # after the first forward pass of a step, weights come from the second shard in the node
        again = (scenario.accumulation * _gathers(scenario) - 1) * weights
        return (ranks - 1) / ranks * (moved - again) / rate + (within - 1) / within * again / intra
    if not scenario.spec.hybrid:
        return (ranks - 1) / ranks * moved / rate
    reduced = 2 * (nodes - 1) / nodes * scenario.accumulation * gradient_bytes
    return (within - 1) / within * moved / intra + reduced / inter


def _gathers(scenario: Scenario) -> int:
    """Return how often a micro batch gathers the weights: for forward and for backward pass.

    Under ZeRO-3 recomputation gathers them again; FSDP2 recomputes a layer after it has gathered it for the backward
    pass.
    """
    if not scenario.spec.reshard_after_forward:
        return 1
    return 3 if scenario.checkpointing and not scenario.is_fsdp else 2


def _offload(scenario: Scenario, hardware: Hardware) -> float:
    if not scenario.offloads_optimizer:
        return 0.0
    rate = hardware.accelerator.host_link * GB
    part = scenario.split.trainable / scenario.world_size
    is_once = scenario.zero_stage == 1 or keeps_flat_gradients(scenario)
    transfers = 1 if is_once else scenario.accumulation  # of gradients to the host
    moved = part * (scenario.gradient * transfers + scenario.compute)
    if scenario.offloads_parameters:
        moved += scenario.split.total / scenario.world_size * scenario.compute * 2 * scenario.accumulation
    seconds = moved / rate
    if scenario.spec.uses_nvme:
        per_node = scenario.split.trainable / scenario.nodes
        seconds += per_node * 2 * 12 / NVME_RATE + scenario.accumulation * 2 * per_node * scenario.compute / NVME_RATE
    return seconds


def _activation_transfers(scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds in which the inputs of layers go to the host and back, on the stream that computes."""
    if not scenario.activation_offload:
        return 0.0
    moved = 2 * scenario.accumulation * len(scenario.model.blocks) * layer_input(scenario)
    return moved / (hardware.accelerator.host_link * GB)


def _optimizer(scenario: Scenario, hardware: Hardware) -> float:
    trained = scenario.split.trainable
    part = trained if scenario.spec.is_ddp else trained / scenario.shards
    if scenario.offloads_optimizer or hardware.is_cpu:
        return part * scenario.ranks_per_node / CPU_ADAM_RATE
    return part * (16 + 2 * BYTES[scenario.precision]) / (hardware.accelerator.bandwidth * GB * 0.8)
