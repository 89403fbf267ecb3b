"""Seconds per optimizer step: compute, launches of kernels, communication, offload, the optimizer.

This is a roofline: each part is bytes or FLOP over a rate, times the share of the rate that real runs reach. The
shares are fitted to 71 published throughputs of one source and to trainings on one H100;
`python -m benchmarks.step_time_accuracy` compares them with these and with other sources. Those of CPUs are fitted to
the trainings of `python -m benchmarks.step_time_cpu`.
"""

from typing import Final, NamedTuple

from shardmake.config.accelerators import Accelerator
from shardmake.config.attention import FLASH_CAPABILITY
from shardmake.config.strategies import DDP, DEEPSPEED, FSDP
from shardmake.core.units import GB
from shardmake.memory.decoder import layer_input
from shardmake.memory.hardware import Hardware
from shardmake.memory.model import fused_experts, matrix_weights, selected_experts
from shardmake.memory.scenario import BYTES, Scenario
from shardmake.memory.size_tensors import fused_chunk
from shardmake.plan.offload_time import gathers, offload_time


class Kernel(NamedTuple):
    """The speed of an attention kernel on causal attention, as parts of the dense peak."""

    narrow: float
    """With heads of 64 numbers, for many tokens."""
    wide: float
    """With heads of 128 numbers."""
    half_tokens: int
    """Tokens of a micro batch at which it reaches half of that."""


# Fitted to MosaicML's tables of A100 and H100 runs (llm-foundry, scripts/train/benchmarking). H100 runs reach a smaller
# share of a higher peak. Older and consumer GPUs are taken as A100, newer ones as H100: no measurement was available.
_HOPPER = 9.0
_MATMUL = {"cpu": 0.86, "volta": 0.91, "ampere": 0.91, "hopper": 0.73}
"""The parts of the dense peak that matrix products reach for a wide model and a large micro batch."""
_HALF_WIDTH = 1100
"""Hidden size at which matrix products on a GPU reach half their share."""
_HALF_TOKENS = {"cpu": 64, "volta": 730, "ampere": 730, "hopper": 730}
"""Tokens of a micro batch at which matrix products reach half their share."""

# On Hopper: forward and backward passes at 2,048, 8,192 and 32,768 tokens on one H100 with torch 2.11, where sdpa is
# cuDNN's kernel and varlen FlashAttention 2 (benchmarks/results/gpu). On Ampere: the FlashAttention-2 paper. Before
# Ampere PyTorch has no flash kernel.
_FLASH_2: Final = {"ampere": Kernel(0.52, 0.60, 730), "hopper": Kernel(0.32, 0.36, 2300)}
_KERNELS: Final = {
    ("cpu", "sdpa"): Kernel(0.86, 0.86, 64),
    ("volta", "sdpa"): Kernel(0.35, 0.35, 730),
    ("hopper", "sdpa"): Kernel(0.46, 0.60, 1400),
}
_MASKED: Final = {"cpu": 0.86, "volta": 0.09, "ampere": 0.09, "hopper": 0.095}
"""The same with a dense mask, or eager, which skips nothing; on Hopper from TRL's packed 8B LoRA on that H100."""

LINK_SHARE = 0.7  # of the nominal link that NCCL's ring reaches (nccl-tests)
EXPOSED = 0.57  # part of communication that does not hide behind compute, fitted with the shares
_DEEPSPEED_ON_CPU = 0.18  # seconds of a step of DeepSpeed on CPUs that are neither compute nor communication
_CPU_ADAM_RATE = 2 * 10**9  # elements per second of a node without GPUs
_BANDWIDTH_SHARE = 0.8  # of a GPU's memory bandwidth that elementwise kernels reach
_FUSED_MOVES = 4
"""Reads and writes of a fused weight in a pass: PEFT 0.21 adds its adapters to it once for a check and once for use."""
_LOSS_BYTES = {"plain": 52, "fused": 12, "chunked": 200}
"""Bytes that the loss moves per logit, forward and backward: 10.1 ms for 4,096 x 128,256 on an H100 when plain.

Head and loss of that size took 16 ms when plain, 41 in chunks and 25 when fused on an H200. The chunks were our own,
for torch 2.11. Liger's chunk of one sequence has 128 tokens, and its products move the whole head.
"""

# What a library needs on the CPU for one layer and pass, to launch its kernels, whatever their size: it hides behind
# kernels that take longer. Fitted to trainings on one H100 of Llamas with 8 narrow and 16 layers of 2,048 without
# checkpointing. The bare libraries need the same: ZeRO-3's hooks take 30 ms a layer in a plain Trainer on a CPU.
_LAUNCH_SECONDS = {
    (DDP, 0): 0.0065, (DEEPSPEED, 1): 0.0095, (DEEPSPEED, 2): 0.0125, (DEEPSPEED, 3): 0.027, (FSDP, 0): 0.0105,
}  # fmt: skip
"""By library and ZeRO stage."""
_FORWARD_LAUNCHES = 0.35
"""Part of them in the forward pass, which recomputation repeats."""
_ADAPTER_LAUNCHES = 1.4
"""Launches of a layer with adapters against one without: at most, since the 8B LoRA on one H100 hides them."""


def step_time(scenario: Scenario, hardware: Hardware, kernel: Kernel | None = None) -> float:
    """Return the seconds of one optimizer step of ``scenario`` on ``hardware``; ``kernel`` replaces the table's."""
    compute = _compute(scenario, hardware, kernel or _kernel(scenario, hardware.accelerator))
    communication = _collectives(scenario, hardware) + _exchanges(scenario, hardware)
    within_layers = _tensor_parallel(scenario, hardware) + _tokens_to_experts(scenario, hardware)
    if hardware.is_cpu:  # the cores that compute are those that communicate
        own = _DEEPSPEED_ON_CPU if scenario.spec.zero_stage else 0.0
        return compute + communication + within_layers + own + _optimizer(scenario, hardware)
    # Communication hides behind compute in part, and never takes less than the links need.
    work = max(compute + EXPOSED * communication, communication, _launches(scenario))
    host = offload_time(scenario, hardware) + _activation_transfers(scenario, hardware)
    return work + within_layers + host + _optimizer(scenario, hardware)


def _generation(accelerator: Accelerator) -> str:
    if accelerator.is_cpu:
        return "cpu"
    capability = accelerator.capability
    return "hopper" if capability >= _HOPPER else "ampere" if capability >= FLASH_CAPABILITY else "volta"


def _kernel(scenario: Scenario, accelerator: Accelerator) -> Kernel:
    generation = _generation(accelerator)
    if _skips_nothing(scenario):
        share = _MASKED[generation]
        return Kernel(share, share, _HALF_TOKENS[generation])
    return _KERNELS.get((generation, scenario.attention)) or _FLASH_2.get(generation) or _KERNELS[generation, "sdpa"]


def _skips_nothing(scenario: Scenario) -> bool:
    return scenario.masked or scenario.attention == "eager"


def _compute(scenario: Scenario, hardware: Hardware, kernel: Kernel) -> float:
    """Return the seconds of all forward and backward passes of one step, with recomputation of the layers.

    The backward pass has two matrix products for each one of the forward pass, or one where the weights are frozen,
    and two and a half times the work in attention.
    """
    blocks, head, attention = (seconds * scenario.accumulation for seconds in _forward(scenario, hardware, kernel))
    adapters = scenario.method_spec.has_adapters
    again = blocks + attention if scenario.checkpointing else 0.0
    again += head if scenario.loss == "chunked" else 0.0
    extra = scenario.extra_forwards * (blocks + head + attention)
    passes = 2.1 if adapters else 3.0
    products = passes * blocks + max(passes * head, _chunks_of_head(scenario, hardware)) + 3.5 * attention
    return products + again + extra + (0.0 if hardware.is_cpu else _memory_bound(scenario, hardware.accelerator))


def _chunks_of_head(scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of a step in which Liger's loss moves the head.

    Each chunk of tokens reads it twice. Its gradient is written, and added: read twice and written
    (``fused_linear_cross_entropy_forward``).
    """
    if scenario.loss != "fused" or hardware.is_cpu:
        return 0.0
    model, tokens = scenario.model, scenario.tokens
    chunks = -(-tokens // fused_chunk(tokens, model.hidden_size, model.vocab_size))
    moved = (2 if scenario.method_spec.has_adapters else 6) * scenario.compute * model.head
    return scenario.accumulation * chunks * moved / _moving(hardware.accelerator)


def _moving(accelerator: Accelerator) -> float:
    """Return the bytes per second that elementwise kernels move."""
    return accelerator.bandwidth * GB * _BANDWIDTH_SHARE


def _memory_bound(scenario: Scenario, accelerator: Accelerator) -> float:
    """Return the seconds of a step in kernels that no matrix product hides: loss, adapters, 4-bit weights.

    An adapter reads its input and, to scale and add, moves its output six times. Each pass over the layers converts
    4-bit weights to 16 bits. Of fused experts, PEFT adds up whole weights, in a forward pass twice.
    """
    model, passes = scenario.model, 3 if scenario.checkpointing else 2
    fused, of_experts = fused_experts(model, scenario.split)
    of_layers = [a.numel for a in scenario.split.adapters if a.block is not None and a not in of_experts]
    widths = sum(of_layers) / scenario.lora_rank
    active = matrix_weights(model) / model.parameters  # of experts, a token passes the selected ones
    moved = float(scenario.tokens * model.vocab_size * _LOSS_BYTES[scenario.loss])
    moved += passes * (scenario.compute * scenario.tokens * 3.5 * widths * active + 2.5 * scenario.split.quantized)
    moved += passes * scenario.compute * _FUSED_MOVES * fused
    return scenario.accumulation * moved / _moving(accelerator)


def _launches(scenario: Scenario) -> float:
    """Return the seconds that the CPU needs to launch the kernels of one step."""
    of_layer = _LAUNCH_SECONDS[scenario.spec.library, scenario.spec.zero_stage]
    of_layer *= _ADAPTER_LAUNCHES if scenario.method_spec.has_adapters else 1.0
    forwards = scenario.checkpointing + scenario.extra_forwards
    return scenario.accumulation * len(scenario.model.blocks) * of_layer * (1 + _FORWARD_LAUNCHES * forwards)


def _forward(scenario: Scenario, hardware: Hardware, kernel: Kernel) -> tuple[float, float, float]:
    """Return the seconds of one forward pass in matrix products of the layers, in the head, and in attention."""
    model, tokens, generation = scenario.model, scenario.tokens, _generation(hardware.accelerator)
    wide = 1.0 if hardware.is_cpu else model.hidden_size / (model.hidden_size + _HALF_WIDTH)
    peak = hardware.flops(scenario.precision, tf32=scenario.tf32)
    head = model.head
    matmul = peak * _MATMUL[generation] * wide * tokens / (tokens + _HALF_TOKENS[generation])
    attention = 4 * tokens * model.attention_width * scenario.sequence_length / 2
    if _skips_nothing(scenario):
        attention *= 2
    rate = kernel.wide if (model.decoder.d if model.decoder else 128) >= 96 else kernel.narrow
    share = rate * tokens / (tokens + kernel.half_tokens)
    return (
        2 * tokens * (matrix_weights(model) - head) / matmul,
        2 * tokens * head / matmul,
        attention / (peak * share),
    )


def _within_node(size: int, moved: float, hardware: Hardware) -> float:
    """Return the seconds in which each rank of a group of ``size`` sends all but its own part of ``moved`` bytes."""
    return (size - 1) / size * moved / (hardware.intra_node * LINK_SHARE)


def _exchanges(scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of Ulysses' all-to-alls, whose groups are within a node.

    Each layer exchanges queries, keys, values and the output. The backward pass exchanges their gradients. A rank keeps
    one part of its numbers and sends the others.
    """
    size, shape = scenario.sequence_parallel, scenario.model.decoder
    if size == 1 or shape is None:
        return 0.0
    passes = scenario.accumulation * (3 if scenario.checkpointing else 2)
    numbers = 2 * (shape.a + shape.k) * shape.d * scenario.tokens * shape.layers * passes
    return _within_node(size, numbers * scenario.compute, hardware)


def _tensor_parallel(scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of AutoTP's collectives, whose groups are within a node; each layer waits for its own.

    Of hidden states, the forward pass reduces the outputs of attention and MLP, a recomputation the first of them, and
    the backward pass the gradient of the input of each of the five matrices that are divided by rows, and of the head.
    The ranks gather logits, or reduce the output of an embedding that is tied to the head
    (``deepspeed/module_inject/layers.py``). A tied embedding that scales its output is whole on every rank, and so is
    the head (`families.part_of`).
    """
    size, model = scenario.tensor_parallel, scenario.model
    whole = model.tied and model.decoder is not None and model.decoder.scaled_embedding
    outside = 0 if whole else 2 if model.tied else 1
    reductions = len(model.blocks) * (8 if scenario.checkpointing else 7) + outside
    numbers = 2 * reductions * model.hidden_size + (0 if model.tied else model.vocab_size)
    return _within_node(size, scenario.accumulation * scenario.tokens * numbers * scenario.compute, hardware)


def _tokens_to_experts(scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds of the all-to-alls that send each token to its experts and back, within a node."""
    size, model = scenario.expert_parallel, scenario.model
    passes = scenario.accumulation * (3 if scenario.checkpointing else 2)
    numbers = 2 * scenario.tokens * selected_experts(model) * model.hidden_size * len(model.blocks) * passes
    return _within_node(size, numbers * scenario.compute, hardware)


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
    if not scenario.spec.gathers_parameters:
        rounds = scenario.accumulation if scenario.spec.zero_stage == 2 else 1
        gathered = scenario.compute * scenario.split.trainable if scenario.spec.zero_stage else gradient_bytes
        return (ranks - 1) / ranks * (rounds * gradient_bytes + gathered) / rate
    weights = scenario.compute * scenario.split.total
    held = scenario.held_model.parameters / scenario.model.parameters  # experts of other ranks are not gathered
    moved = held * scenario.accumulation * (gathers(scenario) * weights + gradient_bytes)
    within, nodes = scenario.ranks_per_node, scenario.nodes
    if scenario.spec.hpz:  # after the first forward pass of a step, weights come from the second shard in the node
        again = (scenario.accumulation * gathers(scenario) - 1) * weights
        return (ranks - 1) / ranks * (moved - again) / rate + (within - 1) / within * again / intra
    if not scenario.spec.hybrid:
        return (ranks - 1) / ranks * moved / rate
    reduced = 2 * (nodes - 1) / nodes * scenario.accumulation * gradient_bytes
    return (within - 1) / within * moved / intra + reduced / inter


def _activation_transfers(scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds in which the inputs of layers go to the host and back, on the stream that computes."""
    if not scenario.activation_offload:
        return 0.0
    moved = 2 * scenario.accumulation * len(scenario.model.blocks) * layer_input(scenario)
    return moved / (hardware.accelerator.host_link * GB)


def _optimizer(scenario: Scenario, hardware: Hardware) -> float:
    trained = scenario.split.trainable
    part = trained if scenario.spec.is_ddp else trained / scenario.shards
    if hardware.is_cpu:
        return part * scenario.ranks_per_node / _CPU_ADAM_RATE
    if scenario.spec.offload_optimizer:
        return 0.0  # `offload_time` has it
    return part * (16 + 2 * BYTES[scenario.precision]) / _moving(hardware.accelerator)
