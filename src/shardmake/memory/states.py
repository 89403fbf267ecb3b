"""Bytes of weights, gradients, optimizer states and buffers that one rank holds, by strategy.

Sources: DeepSpeed's ``runtime/zero/stage_1_and_2.py`` and ``stage3.py``, torch's FSDP2 (``fully_shard``) as Accelerate
sets it up, torch's ``DistributedDataParallel`` reducer, bitsandbytes' optimizers. P stands for all elements, T for the
trained ones, N for the ranks that share a copy.
"""

from math import ceil

from shardmake.memory.buckets import Buckets
from shardmake.memory.model import ParameterSpec
from shardmake.memory.scenario import BYTES, Scenario

Terms = dict[str, int]
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # 4 bits, an 8-bit scale per 64 and a 32-bit one per 64 * 256 (double quant)
CONTEXT = int(0.5 * 2**30)  # CUDA context and kernels, lazily loaded: 0.45 to 0.55 GiB (facts: A100, torch 2)
CUBLAS = 2 * 8_519_680  # a workspace for the forward and one for the backward thread (CUDABlas.cpp: 4096:2:16:8 KiB)
NORM_CHUNK = 250_000_000  # elements that ZeRO-3 takes the norm of at once under offload (`_constant_buffered_norm2`)
NCCL = int(1.45 * 2**30)  # after the first collective, per communicator (ml-engineering, 2 ranks)


def optimizer_bytes(scenario: Scenario, element_bytes: int = 4) -> float:
    """Optimizer state per trained element."""
    match scenario.optimizer:
        case "adamw":
            return 2 * element_bytes
        case "adamw8bit":
            return 2 * (1 + 4 / 256)
        case "adafactor":
            return 0.01
        case "sgd":
            return 0


def resident(scenario: Scenario, buckets: Buckets) -> Terms:
    """What stays on the GPU over the whole step: name of the term to bytes."""
    terms = {
        "weights": _weights(scenario),
        "frozen weights": _frozen(scenario),
        "gradients": _gradient_partition(scenario),
        "master weights": _masters(scenario),
        "optimizer states": _optimizer(scenario),
        "model buffers": scenario.model.buffer_bytes,
        "communication buffers": _communication(scenario, buckets),
        "weights kept whole": _persistent(scenario, buckets),
        "cuBLAS workspaces": 0 if scenario.on_cpu else CUBLAS,
    }
    return {name: size for name, size in terms.items() if size}


def trained_tensors(scenario: Scenario) -> tuple[ParameterSpec, ...]:
    """What the optimizer updates."""
    return scenario.model.tensors if scenario.method == "full" else scenario.split.adapters


def step_groups(scenario: Scenario, buckets: Buckets) -> list[int]:
    """Elements of this rank's part that ZeRO's optimizer updates at once: ZeRO-3's sub-groups, else all."""
    part = ceil(scenario.split.trainable / scenario.shards)
    size = min(buckets.sub_group_size, part) if scenario.zero_stage == 3 else part
    whole, rest = divmod(part, size)
    return [size] * whole + ([rest] if rest else [])


def optimizer_step(scenario: Scenario, buckets: Buckets) -> Terms:
    """What exists only during ZeRO's optimizer step: a group's gradients, flattened, and their fp32 copy."""
    if scenario.offloads_optimizer or scenario.zero_stage == 0:
        return {}
    group = step_groups(scenario, buckets)[0]
    cast = {} if scenario.compute == 4 else {"fp32 gradients": 4 * group}
    return {"flat gradients": scenario.compute * group, **cast}


def norm_bytes(scenario: Scenario) -> int:
    """The copy in fp64 of one gradient, or of its part, of which ZeRO takes the norm (`get_grad_norm_direct`)."""
    if scenario.offloads_optimizer or scenario.zero_stage == 0:
        return 0
    largest = largest_trained(scenario)
    if scenario.zero_stage == 3:
        return 8 * ceil(largest / scenario.shards)
    return 8 * min(largest, ceil(scenario.split.trainable / scenario.shards))


def boundary_norm_bytes(scenario: Scenario, numel: int) -> int:
    """The copy in fp64 for the norm of a gradient of ``numel`` elements, taken on its way to the host under offload."""
    if not scenario.offloads_optimizer or not scenario.zero_stage:
        return 0
    if scenario.zero_stage == 3:
        return 8 * min(ceil(numel / scenario.shards), NORM_CHUNK)
    return 8 * min(numel, ceil(scenario.split.trainable / scenario.shards))


def step_temporaries(scenario: Scenario, buckets: Buckets) -> int:
    """What torch's AdamW makes for one tensor at a time where it is not fused, on CPU: a root and a quotient."""
    if not scenario.on_cpu or scenario.optimizer != "adamw":
        return 0
    flat = min(buckets.sub_group_size, ceil(scenario.split.trainable / scenario.shards))
    return 2 * 4 * (flat if scenario.zero_stage else scenario.model.largest_tensor)


def trained_bytes(scenario: Scenario) -> int:
    """Bytes per element that DDP and FSDP hold trained weights in; adapters are fp32 (PEFT's default)."""
    return BYTES[scenario.weights if scenario.method == "full" else scenario.adapter_weights]


def _gradient_partition(scenario: Scenario) -> int:
    """ZeRO-3's flat buffer of this rank's gradients (``grad_partitions_flat_buffer``)."""
    if scenario.zero_stage != 3 or scenario.offloads_optimizer:
        return 0
    return scenario.compute * ceil(scenario.split.trainable / scenario.shards)


def _persistent(scenario: Scenario, buckets: Buckets) -> int:
    """Weights below ZeRO-3's persistence threshold stay gathered."""
    if scenario.zero_stage != 3 or scenario.world_size == 1:
        return 0
    limit = buckets.stage3_param_persistence_threshold
    tensors = (*scenario.model.tensors, *scenario.split.adapters)
    return scenario.compute * sum(tensor.numel for tensor in tensors if tensor.numel <= limit)


def _weights(scenario: Scenario) -> int:
    trained, n = scenario.split.trainable, scenario.shards
    if scenario.offloads_parameters:
        return 0
    if scenario.zero_stage == 3:
        return scenario.compute * ceil(trained / n)
    if scenario.zero_stage:
        return scenario.compute * trained
    if scenario.is_fsdp:
        return trained_bytes(scenario) * ceil(trained / n)
    return trained_bytes(scenario) * trained


def _frozen(scenario: Scenario) -> int:
    if scenario.offloads_parameters:
        return 0
    size = scenario.compute * scenario.split.frozen + int(NF4_BYTES * scenario.split.quantized)
    return ceil(size / scenario.shards) if scenario.gathers_parameters else size


def _masters(scenario: Scenario) -> int:
    """DeepSpeed's fp32 copy of the trained weights."""
    if scenario.offloads_optimizer or not scenario.zero_stage:
        return 0
    return 4 * ceil(scenario.split.trainable / scenario.shards)


def _optimizer(scenario: Scenario) -> int:
    trained, n = scenario.split.trainable, scenario.shards
    if scenario.offloads_optimizer:
        return 0
    if scenario.zero_stage:
        return ceil(optimizer_bytes(scenario) * ceil(trained / n))
    if scenario.is_fsdp:
        return ceil(optimizer_bytes(scenario, trained_bytes(scenario)) * ceil(trained / n))
    return ceil(optimizer_bytes(scenario, trained_bytes(scenario)) * trained)


def _communication(scenario: Scenario, buckets: Buckets) -> int:
    """Reducer buckets of DDP (a copy of the gradients), ZeRO-3's bucket of gradients on their way."""
    if scenario.spec.is_ddp:
        return trained_bytes(scenario) * scenario.split.trainable if scenario.world_size > 1 else 0
    if scenario.zero_stage == 3:
        return scenario.compute * buckets.reduce_bucket_size
    if scenario.zero_stage in (1, 2) and scenario.offloads_optimizer:
        return scenario.compute * largest_trained(scenario)  # temp_grad_buffer_for_gpu_offload
    return 0


def largest_trained(scenario: Scenario) -> int:
    """Elements of the largest trained tensor."""
    return max(tensor.numel for tensor in trained_tensors(scenario))


def gradients(scenario: Scenario) -> int:
    """Bytes of gradients at the end of a backward pass, beside ZeRO-3's flat buffer, which is resident."""
    trained, n = scenario.split.trainable, scenario.shards
    if scenario.zero_stage == 1:
        return scenario.compute * trained
    if scenario.zero_stage == 2:
        return 0 if scenario.offloads_optimizer else scenario.compute * ceil(trained / n)
    if scenario.zero_stage == 3 or (scenario.is_fsdp and scenario.offloads_parameters):
        return 0
    return trained_bytes(scenario) * (ceil(trained / n) if scenario.is_fsdp else trained)


def bucket_bytes(scenario: Scenario, buckets: Buckets) -> int:
    """Buffers that live during a backward pass: ZeRO-1 and 2's buckets, FSDP's reduce-scatter of one layer."""
    if scenario.zero_stage in (1, 2):
        copies = 2 if buckets.overlap_comm else 1
        return copies * scenario.compute * buckets.reduce_bucket_size
    if scenario.is_fsdp and scenario.method == "full":
        return 2 * scenario.compute * scenario.model.largest_block
    return 0
