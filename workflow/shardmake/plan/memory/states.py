"""Bytes of weights, gradients, optimizer states and buffers that one rank holds, by strategy.

Sources: DeepSpeed's ``runtime/zero/stage_1_and_2.py`` and ``stage3.py``, torch's FSDP2 (``fully_shard``) as Accelerate
sets it up, torch's ``DistributedDataParallel`` reducer, bitsandbytes' optimizers. P stands for all elements, T for the
trained ones, N for the ranks that share a copy.
"""

from math import ceil

from shardmake.plan.buckets import Buckets
from shardmake.plan.memory.scenario import BYTES, Scenario

Terms = dict[str, int]
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # 4 bits, an 8-bit scale per 64 and a 32-bit one per 64 * 256 (double quant)
CONTEXT = int(0.5 * 2**30)  # CUDA context and kernels, lazily loaded: 0.45 to 0.55 GiB (facts: A100, torch 2)
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
        "optimizer states": _optimizer(scenario),
        "model buffers": scenario.model.buffer_bytes,
        "communication buffers": _communication(scenario, buckets),
    }
    return {name: size for name, size in terms.items() if size}


def gradients(scenario: Scenario) -> Terms:
    """Gradients that live at the end of the backward pass."""
    trained, n = scenario.split.trainable, scenario.shards
    if scenario.zero_stage in (2, 3):
        on_gpu = not scenario.offloads_optimizer
        return {"gradients": scenario.compute * ceil(trained / n)} if on_gpu else {}
    if scenario.zero_stage == 1:
        return {"gradients": scenario.compute * trained}
    if scenario.strategy == "fsdp-offload":
        return {}
    if scenario.is_fsdp:
        return {"gradients": 4 * ceil(trained / n)}
    return {"gradients": BYTES[_trained_type(scenario)] * trained}


def optimizer_step(scenario: Scenario, buckets: Buckets) -> Terms:
    """What exists only during the optimizer's step."""
    trained, n = scenario.split.trainable, scenario.shards
    if scenario.offloads_optimizer or scenario.zero_stage == 0:
        return {}
    part = ceil(trained / n)
    if scenario.zero_stage == 3:
        return {"fp32 gradients of a sub-group": 4 * min(buckets.sub_group_size, part)}
    return {"flat gradients": scenario.compute * part, "fp32 gradients": 4 * part}


def _trained_type(scenario: Scenario) -> str:
    """Data type that DDP holds trained weights in; adapters are fp32 (PEFT's default)."""
    return scenario.weights if scenario.method == "full" else "fp32"


def _weights(scenario: Scenario) -> int:
    trained, n = scenario.split.trainable, scenario.shards
    if scenario.offloads_parameters:
        return 0
    if scenario.zero_stage == 3:
        return scenario.compute * ceil(trained / n)
    if scenario.zero_stage:
        return scenario.compute * trained
    if scenario.is_fsdp:
        return 4 * ceil(trained / n)
    return BYTES[_trained_type(scenario)] * trained


def _frozen(scenario: Scenario) -> int:
    if scenario.offloads_parameters:
        return 0
    size = scenario.compute * scenario.split.frozen + int(NF4_BYTES * scenario.split.quantized)
    return ceil(size / scenario.shards) if scenario.gathers_parameters else size


def _optimizer(scenario: Scenario) -> int:
    trained, n = scenario.split.trainable, scenario.shards
    if scenario.offloads_optimizer:
        return 0
    if scenario.zero_stage:
        master = 4 if scenario.precision != "fp32" else 0
        return ceil((master + optimizer_bytes(scenario)) * ceil(trained / n))
    if scenario.is_fsdp:
        return ceil(optimizer_bytes(scenario) * ceil(trained / n))
    return ceil(optimizer_bytes(scenario, BYTES[_trained_type(scenario)]) * trained)


def _communication(scenario: Scenario, buckets: Buckets) -> int:
    """Reducer buckets of DDP (a copy of the gradients), DeepSpeed's bucket of gradients on their way."""
    if scenario.strategy == "ddp":
        return BYTES[_trained_type(scenario)] * scenario.split.trainable if scenario.world_size > 1 else 0
    if scenario.zero_stage == 0:
        return 0
    copies = 2 if scenario.zero_stage < 3 and buckets.overlap_comm else 1
    elements = min(buckets.reduce_bucket_size, max(scenario.split.trainable, 1))
    return copies * scenario.compute * elements
