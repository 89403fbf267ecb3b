"""Bytes of weights, gradients, optimizer states and buffers that one rank holds, by strategy.

Sources: DeepSpeed's ``runtime/zero/stage_1_and_2.py`` and ``stage3.py``, torch's FSDP2 (``fully_shard``) as Accelerate
sets it up, torch's ``DistributedDataParallel`` reducer, bitsandbytes' optimizers.
"""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from math import ceil

from shardmake.memory.buckets import Buckets
from shardmake.memory.model import MODELS, Model, ParameterSpec, Split, is_quantized, selected_experts
from shardmake.memory.optimizer_trial import optimizer_spec
from shardmake.memory.scenario import BYTES, Scenario

Terms = dict[str, int]
HEAD = "head"
EMBEDDING = "embedding"
HOPPER = 9.0  # compute capability
Unit = int | str  # weights that ZeRO-3 and FSDP gather at once: a layer, the embedding, or norm with head
NF4_BYTES = 0.5
SCALE_BYTES = 1 / 64 + 4 / (64 * 256)  # an 8-bit scale per 64 weights and a 32-bit one per 64 * 256 (double quant)
CONTEXT = int(0.5 * 2**30)  # CUDA context and kernels, lazily loaded: 0.45 to 0.55 GiB on an A100 with torch 2
CONTEXT_OF_HOPPER = int(0.75 * 2**30)  # 0.61 GiB bare, 0.73 to 0.76 in a training: one H100, CUDA 13, torch 2.11
CUBLAS = 2 * 8_519_680  # a workspace for the forward and one for the backward thread (CUDABlas.cpp: 4096:2:16:8 KiB)
NORM_CHUNK = 250_000_000  # elements that ZeRO-3 takes the norm of at once under offload (`_constant_buffered_norm2`)
NCCL = int(1.45 * 2**30)  # after the first collective, per communicator (ml-engineering, 2 ranks)
NCCL_OF_ONE_RANK = int(0.53 * 2**30)  # one rank has communicators, too: 1.28 GiB with the context on one H100
ZERO_OF_ONE_RANK = int(0.38 * 2**30)  # further ones of ZeRO-1 and ZeRO-2 there: 1.66 GiB


def context_bytes(capability: float | None) -> int:
    """Return the bytes of CUDA's context and kernels on a GPU of this compute capability; None if it is unknown."""
    return CONTEXT_OF_HOPPER if (capability or 0.0) >= HOPPER else CONTEXT


def flattens_on_gpu(scenario: Scenario) -> bool:
    """Return True if ZeRO-1 and ZeRO-2 flatten the weights on the GPU, where they are twice then.

    Without room for that, the flat copy is made in host RAM (``flatten_on_accelerator`` of ``stage_1_and_2.py``).
    """
    if scenario.spec.zero_stage not in (1, 2) or scenario.gpu_memory is None or scenario.on_cpu:
        return False
    flat = scenario.compute * scenario.split.trainable
    return flat + frozen_bytes(scenario) + flat <= scenario.gpu_memory


def optimizer_bytes(scenario: Scenario, element_bytes: int = 4) -> float:
    """Return the bytes of optimizer state per trained element."""
    spec = optimizer_spec(scenario.optimizer)
    fewer = 0.0 if spec.matrix_moments is None else spec.moments - spec.matrix_moments
    share = sum(tensor.numel for tensor in _own_update(scenario)) / scenario.split.trainable
    return (spec.moments - fewer * share) * element_bytes + spec.state_bytes


def _own_update(scenario: Scenario) -> list[ParameterSpec]:
    """Return the matrices that the optimizer updates as Muon, as whole ones."""
    if optimizer_spec(scenario.optimizer).matrix_moments is None:
        return []
    return [tensor for tensor in scenario.split.trained(scenario.model) if tensor.is_hidden_matrix]


def resident(scenario: Scenario, buckets: Buckets) -> Terms:
    """Return the bytes that stay on the GPU during the whole step, by term.

    The gradients are ZeRO-3's flat buffer (``grad_partitions_flat_buffer``), the master weights DeepSpeed's fp32 copy.
    """
    on_gpu = scenario.spec.zero_stage and not scenario.spec.offload_optimizer
    frozen_part = frozen_bytes(scenario) - scale_bytes(scenario)
    if scenario.spec.gathers_parameters:
        frozen_part = ceil(frozen_part / scenario.shards)
    terms = {
        "weights": _weights(scenario),
        "frozen weights": 0 if scenario.spec.offload_param else frozen_part,
        "quantization scales": scale_bytes(scenario),
        "reference model": 0 if scenario.spec.offload_param else reference_bytes(scenario),
        "gathered reference": _gathered_reference(scenario),
        "second shard of the weights": _second_shard(scenario),
        "gradients": scenario.gradient * scenario.part if on_gpu and scenario.spec.zero_stage == 3 else 0,
        "master weights": 4 * scenario.part if on_gpu else 0,
        "optimizer states": _optimizer(scenario),
        "model buffers": scenario.model.buffer_bytes,
        "communication buffers": _communication(scenario, buckets),
        "persistent weights": _persistent(scenario, buckets),
        "exchanged tokens": _exchanged_tokens(scenario),
        "cuBLAS workspaces": 0 if scenario.on_cpu else CUBLAS,
    }
    return {name: size for name, size in terms.items() if size}


def _gathered_reference(scenario: Scenario) -> int:
    """Return the weights of the reference that FSDP gathers once and never frees, which a backward pass would do.

    They are norm and head, or all weights with ``reshard_after_forward: false``.
    """
    if not (scenario.reference_weights and scenario.spec.is_fsdp):
        return 0
    sizes = units(scenario)
    return scenario.compute * (sizes.get(HEAD, 0) if scenario.spec.reshard_after_forward else sum(sizes.values()))


def _exchanged_tokens(scenario: Scenario) -> int:
    """Return the rows that expert-parallel ranks exchange, one for each token and expert.

    Each layer keeps the returned ones for its backward pass; a layer that runs also has those that it sends, receives
    and returns (`AllToAllEP` of transformers' ``distributed/expert_parallel.py``).
    """
    if scenario.expert_parallel == 1:
        return 0
    kept = 1 if scenario.checkpointing else len(scenario.model.blocks)
    rows = scenario.tokens * selected_experts(scenario.model)
    return scenario.compute * rows * scenario.model.hidden_size * (kept + 3)


def reference_bytes(scenario: Scenario) -> int:
    """Return the bytes of one rank's part of the reference model, wherever it is; 0 if the run needs none.

    DeepSpeed casts it to the compute type and shards it under ZeRO-3 only (`prepare_deepspeed` of TRL's
    ``models/utils.py``). FSDP shards it as the trained model, in fp32.
    """
    if not scenario.reference_weights:
        return 0
    held = scenario.compute if scenario.spec.zero_stage else BYTES[scenario.weights]
    return held * ceil(scenario.model.parameters / (scenario.shards if scenario.spec.gathers_parameters else 1))


def step_groups(scenario: Scenario, buckets: Buckets) -> list[int]:
    """Return the elements that ZeRO's optimizer updates at once: ZeRO-3's sub-groups, else the rank's whole part."""
    size = largest_group(scenario, buckets)
    whole, rest = divmod(scenario.part, size)
    return [size] * whole + ([rest] if rest else [])


def largest_group(scenario: Scenario, buckets: Buckets) -> int:
    """Return the most elements that ZeRO's optimizer updates at once, which lie in one storage.

    ZeRO-3 adds tensors to a sub-group until it has ``sub_group_size`` elements, so that the last one can exceed it
    (`_create_fp16_sub_groups`). The order of the tensors is the optimizer's; this is the bound for any order.
    """
    if scenario.spec.zero_stage != 3:
        return scenario.part
    return min(scenario.part, buckets.sub_group_size - 1 + ceil(largest_trained(scenario) / scenario.shards))


def optimizer_step(scenario: Scenario, buckets: Buckets) -> Terms:
    """Return the temporaries of ZeRO's optimizer step: flattened gradients of a group and their fp32 copy."""
    if scenario.spec.offload_optimizer or scenario.spec.zero_stage == 0 or keeps_flat_gradients(scenario):
        return {}
    group = step_groups(scenario, buckets)[0]
    cast = {} if scenario.gradient == 4 else {"fp32 gradients": 4 * group}
    return {"flat gradients": scenario.gradient * group, **cast}


def keeps_flat_gradients(scenario: Scenario) -> bool:
    """Return True if ZeRO-2 adds reduced gradients to one flat fp32 tensor, which the optimizer takes as it is.

    Source: ``_build_compact_grad_partition_buffer``. The tensor is on the GPU under offload too.
    """
    return scenario.spec.zero_stage == 2 and scenario.widens_gradients


def reduction_bytes(scenario: Scenario, buckets: Buckets, numel: int) -> int:
    """Return the bytes of the fp32 copy in which ZeRO reduces 16-bit gradients, the largest of ``numel`` elements.

    ZeRO-2 copies each bucket (`allreduce_bucket`). ZeRO-3's bucket is in fp32 itself, so that only a gradient larger
    than the bucket is copied (`__avg_scatter_grads`).
    """
    if not scenario.widens_gradients or scenario.spec.is_fsdp:
        return 0
    if scenario.spec.zero_stage == 3:
        return 4 * numel if numel > buckets.reduce_bucket_size else 0
    return 4 * max(numel, buckets.reduce_bucket_size)


def overflow_bytes(scenario: Scenario) -> tuple[int, int]:
    """Return the bytes of the copy of this rank's flat gradients in which ZeRO-3 looks for infinities, and of a mask.

    ``torch.isinf`` compares absolute values, which are such a copy (`has_overflow` of ``stage3.py``). Its result has a
    byte per element. Both are where the flat gradients are: in host RAM if the states are offloaded.
    """
    part = scenario.part if scenario.spec.zero_stage == 3 and scenario.precision == "fp16" else 0
    return scenario.gradient * part, part


def norm_bytes(scenario: Scenario, numel: int, *, offloaded: bool = False) -> int:
    """Return the bytes of the fp64 copy for the norm of a gradient of ``numel`` elements (`get_grad_norm_direct`).

    ZeRO makes it at the step, and of an ``offloaded`` gradient when that is complete.
    """
    if not scenario.spec.zero_stage or offloaded != bool(scenario.spec.offload_optimizer):
        return 0
    if scenario.spec.zero_stage == 3:
        return 8 * min(ceil(numel / scenario.shards), NORM_CHUNK if offloaded else numel)
    return 8 * min(numel, scenario.part)


def step_temporaries(scenario: Scenario, buckets: Buckets) -> int:
    """Return the temporaries of the update of one tensor.

    On CPUs AdamW has a root and a quotient. Muon has a matrix [m, n] three times in bf16, before and after two steps of
    its iteration, and two products [m, m] for the smaller m.
    """
    shapes = (sorted(tensor.shape) for tensor in _own_update(scenario))
    products = max((2 * m * (3 * n + 2 * m) for m, n in shapes), default=0)
    count = optimizer_spec(scenario.optimizer).temporaries
    if not (scenario.on_cpu and count):
        return products
    largest = largest_group(scenario, buckets) if scenario.spec.zero_stage else scenario.model.largest_tensor
    return max(products, count * 4 * largest)


def trained_bytes(scenario: Scenario) -> int:
    """Return the bytes per trained element under DDP and FSDP; adapters are fp32 (PEFT's default)."""
    return BYTES[scenario.adapter_weights if scenario.method_spec.has_adapters else scenario.weights]


def _persistent(scenario: Scenario, buckets: Buckets) -> int:
    """Return the size of the weights below ZeRO-3's persistence threshold, which stay gathered."""
    if scenario.spec.zero_stage != 3 or scenario.world_size == 1:
        return 0
    limit = buckets.stage3_param_persistence_threshold
    tensors = (*scenario.model.tensors, *scenario.split.adapters)
    models = 2 if scenario.reference_weights else 1
    return models * scenario.compute * sum(tensor.numel for tensor in tensors if tensor.numel <= limit)


def _weights(scenario: Scenario) -> int:
    if scenario.spec.offload_param:
        return 0
    held = scenario.compute if scenario.spec.zero_stage else trained_bytes(scenario)
    return held * (scenario.part if scenario.spec.gathers_parameters else scenario.split.trainable)


def scale_bytes(scenario: Scenario) -> int:
    """Return the bytes of the scales of 4-bit weights, which every rank holds in full.

    bitsandbytes keeps them beside the parameter (``Params4bit.quant_state``, also ``Linear4bit.quant_state``), so FSDP
    neither shards nor offloads them.
    """
    return int(SCALE_BYTES * scenario.split.quantized)


def _second_shard(scenario: Scenario) -> int:
    """Return the size of hpZ's second shard: all weights, over the ranks of a node instead of all ranks.

    DeepSpeed drops it after an optimizer step and creates it in the next forward pass, so it is there at every peak.
    Source: ``_partition_param_sec`` of ``partition_parameters.py``, ``ds_secondary_tensor``.
    """
    if not scenario.spec.hpz:
        return 0
    return ceil((scenario.compute * scenario.split.trainable + frozen_bytes(scenario)) / scenario.ranks_per_node)


def frozen_bytes(scenario: Scenario) -> int:
    """Return the bytes of all weights that are not trained, unsharded, with the scales of those in 4 bits."""
    return scenario.frozen * scenario.split.frozen + int(NF4_BYTES * scenario.split.quantized) + scale_bytes(scenario)


def _optimizer(scenario: Scenario) -> int:
    if scenario.spec.offload_optimizer:
        return 0
    held = scenario.split.trainable if scenario.spec.is_ddp else scenario.part
    return ceil(optimizer_bytes(scenario, 4 if scenario.spec.zero_stage else trained_bytes(scenario)) * held)


def _communication(scenario: Scenario, buckets: Buckets) -> int:
    """Return the size of DDP's reducer buckets (a copy of the gradients) or of ZeRO's reduction buffers."""
    if scenario.spec.is_ddp:
        return trained_bytes(scenario) * scenario.split.trainable if scenario.world_size > 1 else 0
    if scenario.spec.zero_stage == 3:
        return scenario.gradient * buckets.reduce_bucket_size
    if scenario.spec.zero_stage in (1, 2) and scenario.spec.offload_optimizer:
        return scenario.compute * largest_trained(scenario)  # temp_grad_buffer_for_gpu_offload
    return 0


def largest_trained(scenario: Scenario) -> int:
    """Return the elements of the largest trained tensor."""
    return max(tensor.numel for tensor in scenario.split.trained(scenario.model))


def gradients(scenario: Scenario) -> int:
    """Return the bytes of gradients after a backward pass, without ZeRO-3's flat buffer, which is resident."""
    if scenario.spec.zero_stage == 1:
        return scenario.compute * scenario.split.trainable
    if scenario.spec.zero_stage == 2:
        return partition_gradients(scenario)
    if scenario.spec.zero_stage == 3 or (scenario.spec.is_fsdp and scenario.spec.offload_param):
        return 0
    return trained_bytes(scenario) * (scenario.part if scenario.spec.is_fsdp else scenario.split.trainable)


def partition_gradients(scenario: Scenario) -> int:
    """Return the bytes of ZeRO-2's gradients of this rank's part, on the rank that has the most.

    ``copy_grads_in_partition`` keeps each tensor of which a rank has an element as a whole. The flat fp32 buffer has
    the part only (`keeps_flat_gradients`). Under offload the part is in host RAM.
    """
    if keeps_flat_gradients(scenario):
        return scenario.gradient * scenario.part
    touched = largest_touched(scenario.model, scenario.split, scenario.part)
    return 0 if scenario.spec.offload_optimizer else scenario.gradient * touched


def added_gradients(scenario: Scenario) -> int:
    """Return the bytes of ZeRO-2's gradients of one micro step, beside those of earlier ones that they are added to.

    Source: ``independent_gradient_partition_epilogue``, ``avg_new``.
    """
    apart = scenario.spec.zero_stage == 2 and scenario.accumulation > 1 and not keeps_flat_gradients(scenario)
    return partition_gradients(scenario) if apart else 0


@lru_cache(maxsize=MODELS)
def largest_touched(model: Model, part: Split, size: int) -> int:
    """Return the most elements of trained tensors that lie partly or as a whole in one rank's part of this ``size``."""
    touched: Counter[int] = Counter()
    start = 0
    for tensor in part.trained(model):
        ranks = range(start // size, (start + tensor.numel - 1) // size + 1)
        touched.update(dict.fromkeys(ranks, tensor.numel))
        start += tensor.numel
    return max(touched.values())


def bucket_bytes(scenario: Scenario, buckets: Buckets) -> int:
    """Return the size of buffers during a backward pass.

    ZeRO-1/2 have buckets, ZeRO-3 a copy of its bucket (``reduce_scatter_coalesced``), FSDP reduce-scatters a layer.
    """
    if scenario.spec.zero_stage in (1, 2):
        return (1 + buckets.overlap_comm) * scenario.compute * buckets.reduce_bucket_size
    if scenario.spec.zero_stage == 3:
        return scenario.gradient * min(buckets.reduce_bucket_size, scenario.split.trainable)
    if scenario.spec.is_fsdp and not scenario.method_spec.has_adapters:
        return (scenario.compute + scenario.gradient) * scenario.model.largest_block
    return 0


def unit_of(tensor: ParameterSpec, tied: bool) -> Unit:
    """Return the group of ``tensor``: its layer, the embedding, or the tail, which has a ``tied`` embedding too."""
    outside = EMBEDDING if tensor.kind == "embedding" and not tied else HEAD
    return outside if tensor.block is None else tensor.block


def units(scenario: Scenario) -> Mapping[Unit, int]:
    """Return the elements of each group; 4-bit weights count as the 16-bit elements that store them."""
    tensors = unit_tensors(scenario.held_model, scenario.split, scenario.compute)
    return {unit: sum(parts) for unit, parts in tensors.items()}


@lru_cache(maxsize=MODELS)
def unit_tensors(model: Model, part: Split, compute: int) -> Mapping[Unit, list[int]]:
    """Return the elements of each tensor of each group, adapters last."""
    sizes: dict[Unit, list[int]] = {}
    for tensor in (*model.tensors, *part.adapters):
        quantized = part.quantized and is_quantized(tensor) and "lora_" not in tensor.name
        numel = ceil(tensor.numel * NF4_BYTES / compute) if quantized else tensor.numel
        sizes.setdefault(unit_of(tensor, model.tied), []).append(numel)
    return sizes


@lru_cache(maxsize=MODELS)
def trained_units(model: Model, part: Split) -> Mapping[Unit, int]:
    """Return the trained elements of each group."""
    sizes: Counter[Unit] = Counter()
    for tensor in part.trained(model):
        sizes[unit_of(tensor, model.tied)] += tensor.numel
    return sizes
