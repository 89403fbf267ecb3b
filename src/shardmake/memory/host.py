"""Host RAM and NVMe per node, and disk for checkpoints and the final model."""

from math import ceil

from shardmake.config.choices import EvaluationBackend
from shardmake.memory import states
from shardmake.memory.buckets import Buckets
from shardmake.memory.decoder import layer_input
from shardmake.memory.hardware import Hardware
from shardmake.memory.scenario import BYTES, Scenario
from shardmake.memory.states import Terms

PROCESS = int(1.5 * 2**30)  # imports, CUDA's host part and NCCL's pinned buffers: 0.9 to 1.5 GiB; the upper end
WEIGHTS_FILE = 50 * 10**9  # the largest file of save_pretrained
LOADING_THREADS = 4  # transformers' `GLOBAL_WORKERS`; 4-bit weights are loaded one by one
CPU_PASS = 2 * 2**30  # activations of an evaluation's pass, and a part of its logits with their fp32 copies
INFERENCE_SHARE = 0.7  # of a GPU's memory, for the weights of a model that is only evaluated, next to activations
CPU_PROCESS = int(0.6 * 2**30)  # imports of torch, transformers, deepspeed without a GPU

READY_RANK = 3 * 2**28  # imports without CUDA: 484 MiB of its own with torch's build for CUDA, and a tokenizer
LAUNCHER = int(0.4 * 2**30)  # imports of torch, accelerate and deepspeed: 397 MiB


def pinned(size: int) -> int:
    """Return the bytes of torch's CachingHostAllocator for ``size``: the next power of two."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def host_terms(scenario: Scenario, buckets: Buckets) -> Terms:
    """Return the host RAM of one node during training, and the largest additional peak: of loading or of a save."""
    ranks = scenario.ranks_per_node
    terms = {"processes": ranks * (CPU_PROCESS if scenario.on_cpu else PROCESS)}
    terms |= {name: ranks * size for name, size in offloaded(scenario, buckets).items()}
    if scenario.spec.offload_param:
        terms["reference model"] = ranks * states.reference_bytes(scenario)
    if scenario.activation_offload:
        hold = int if scenario.on_cpu else pinned
        terms["activations"] = ranks * len(scenario.model.blocks) * hold(layer_input(scenario))
    if scenario.checkpoint_in_memory:
        terms["checkpoint in scratch"] = _part_of_checkpoint(scenario)
    steady = sum(terms.values()) - terms["processes"]
    if scenario.keeps_ready:
        terms["ready ranks"] = ranks * READY_RANK + LAUNCHER
    gathered, offloads = scenario.compute * scenario.model.whole_parameters, scenario.spec.offload_optimizer
    peaks = {
        "gathered weights": gathered if scenario.has_script and scenario.spec.zero_stage == 3 else 0,
        "loading": max(0, _load(scenario) - steady),
        "saving": save_bytes(scenario, buckets),
        "overflow check": ranks * sum(states.overflow_bytes(scenario)) if offloads else 0,
    }
    largest = max(peaks, key=peaks.__getitem__)
    terms[largest] = peaks[largest]
    return {name: size for name, size in terms.items() if size}


def offloaded(scenario: Scenario, buckets: Buckets) -> Terms:
    """Return the offloaded states of one rank (``stage_1_and_2.py`` and ``stage3.py``: 18 and 20 bytes per element)."""
    if not scenario.spec.offload_optimizer:
        return {}
    hold = pinned if buckets.pin_memory and not scenario.on_cpu else int
    hold_parameters = pinned if buckets.pin_parameters and not scenario.on_cpu else int
    part = ceil(scenario.split.trainable / scenario.world_size)
    whole = ceil(scenario.split.total / scenario.world_size)
    if scenario.spec.uses_nvme:
        group = states.largest_group(scenario, buckets)
        swapped = buckets.param_buffer_count * buckets.param_buffer_size
        return {
            "optimizer swap buffers": hold(4 * buckets.buffer_count * group),
            "gradients": hold(4 * group) + hold(scenario.gradient * part),
            "parameters": hold_parameters(scenario.compute * min(buckets.max_in_cpu, whole)),
            "parameter swap buffers": hold_parameters(scenario.compute * swapped),
        }
    held = {
        "optimizer states": int(states.optimizer_bytes(scenario) * part),
        "master weights": hold(4 * part),
        "gradients": hold(4 * part),
    }
    if scenario.spec.is_fsdp:
        return held
    # ZeRO-3's flat gradients; the weights on their way to the GPU under ZeRO-1 and ZeRO-2.
    item = scenario.gradient if scenario.spec.zero_stage == 3 else scenario.compute
    held["gradients or weights in transfer"] = hold(item * part)
    if scenario.spec.zero_stage < 3:
        held["largest gradient"] = hold(scenario.compute * states.largest_trained(scenario))
    if scenario.spec.offload_param:
        held["parameters"] = hold_parameters(scenario.compute * whole)
    return held


def _load(scenario: Scenario) -> int:
    """Return the peak of loading the weights on one node: once under FSDP and ZeRO-3, else once per rank.

    Weights that go to the GPU directly are in host RAM only while they are converted. Under FSDP and ZeRO-3 rank 0
    reads them from mapped files, and holds a copy of those that transformers joins or converts.
    """
    trains_all = not scenario.method_spec.has_adapters
    held = BYTES[scenario.weights] if trains_all and scenario.spec.zero_stage == 0 else scenario.compute
    if scenario.loads_on_gpu:
        threads = 1 if scenario.method_spec.in_four_bits else LOADING_THREADS
        largest = sorted((tensor.numel for tensor in scenario.model.tensors), reverse=True)[:threads]
        return scenario.ranks_per_node * (held * sum(largest) + _flattened(scenario))
    size = held * scenario.model.whole_parameters * (2 if scenario.reference_weights else 1)
    return size if scenario.spec.gathers_parameters else scenario.ranks_per_node * size


def _flattened(scenario: Scenario) -> int:
    """Return the host copies of ZeRO-1 and ZeRO-2, which flatten weights there if the GPU cannot hold them twice.

    The tensors and the flat copy of them exist at once (`stage_1_and_2.py`, ``flatten_on_accelerator``).
    """
    if scenario.spec.zero_stage not in (1, 2) or scenario.gpu_memory is None or states.flattens_on_gpu(scenario):
        return 0
    return 2 * scenario.compute * scenario.split.trainable


def save_bytes(scenario: Scenario, buckets: Buckets) -> int:
    """Return the copies of GPU memory on the first node while all its ranks save.

    torch.save copies each storage to the host as a whole before it writes it (`torch/serialization.py`, ``_save``). The
    largest storages are ZeRO's flat fp32 states: a rank's whole part, or a sub-group of it under ZeRO-3. Under ZeRO-1
    and ZeRO-2 rank 0, with each rank of its tensor-parallel group, also saves the weights, which lie in one flat
    storage. Under DDP safetensors holds all tensors of a file (``_flatten_as_ptr``). The distributed checkpoint of FSDP
    copies one tensor at a time.
    """
    trained = scenario.split.trainable
    if scenario.on_cpu or scenario.spec.is_fsdp:
        return 0
    if scenario.spec.is_ddp:
        return min(states.trained_bytes(scenario) * trained, WEIGHTS_FILE)
    of_rank = 0 if scenario.spec.offload_optimizer else 4 * states.largest_group(scenario, buckets)
    weights = 0 if scenario.spec.zero_stage == 3 else scenario.compute * trained
    with_weights = scenario.tensor_parallel
    return (scenario.ranks_per_node - with_weights) * of_rank + with_weights * max(of_rank, weights)


def evaluation_bytes(parameters: int, weights: int, ranks: int, hardware: Hardware, backend: EvaluationBackend) -> int:
    """Return the host RAM of an evaluation: its processes, the one that starts them, and what they hold of a model.

    ``backend`` may be `auto`. Weights that fit each GPU go there directly. Otherwise the host holds them twice at most:
    as they are read, and offloaded. On CPUs each rank holds them in fp32, next to activations and logits.
    """
    if hardware.is_cpu:
        return CPU_PROCESS + ranks * (CPU_PROCESS + CPU_PASS + 4 * parameters)
    direct = backend in ("auto", "whole") and weights < INFERENCE_SHARE * hardware.gpu_memory
    return CPU_PROCESS + ranks * PROCESS + (0 if direct else 2 * weights)


def nvme_bytes(scenario: Scenario) -> Terms:
    """Return the files on a node's NVMe (ZeRO-Infinity): master weights, both moments, gradients and parameters."""
    if not scenario.spec.uses_nvme:
        return {}
    part = ceil(scenario.split.trainable / scenario.nodes)
    whole = ceil(scenario.split.total / scenario.nodes)
    return {"optimizer states": 16 * part, "parameters": scenario.compute * whole}


def checkpoint_bytes(scenario: Scenario) -> int:
    """Return the size of one training checkpoint: weights, master weights and optimizer states of all nodes.

    Trainer leaves frozen weights out of it under adapters (``exclude_frozen_parameters``). Tensor-parallel ranks
    save their parts, and each what they all hold.
    """
    trained = scenario.tensor_parallel * scenario.split.trainable
    held = states.optimizer_bytes(scenario) * trained
    if not scenario.method_spec.has_adapters:
        held += states.frozen_bytes(scenario)
    return int((4 + (scenario.compute if scenario.spec.zero_stage else 0)) * trained + held)


def _part_of_checkpoint(scenario: Scenario) -> int:
    """Return the bytes of a checkpoint that the first node writes, which are the most: shards and unsharded states.

    Under ddp everything is unsharded; under ZeRO-1 and ZeRO-2 the weights in the compute type are.
    """
    whole = checkpoint_bytes(scenario)
    if scenario.spec.is_ddp:
        return whole
    trained = scenario.tensor_parallel * scenario.split.trainable
    first = scenario.compute * trained if scenario.spec.zero_stage in (1, 2) else 0
    return first + ceil((whole - first) / scenario.nodes)


def disk_terms(scenario: Scenario, kept: int) -> Terms:
    """Return the disk space of ``kept`` checkpoints, the one being written, and the final model."""
    return {
        "checkpoints": (kept + 1) * checkpoint_bytes(scenario),
        "final model": 2 * scenario.model.whole_parameters,
    }
