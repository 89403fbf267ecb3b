"""DeepSpeed's buffer sizes as the rendered file sets them, with DeepSpeed's defaults for the rest.

``"auto"`` is resolved as transformers' Trainer does, from the hidden size (`transformers.integrations.deepspeed`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from shardmake.config.models import Cluster
from shardmake.config.strategies import Device
from shardmake.core.units import GIB
from shardmake.memory.hardware import from_cluster
from shardmake.memory.model import Model
from shardmake.memory.scenario import BYTES
from shardmake.run.plan import Choice


@dataclass(frozen=True)
class Buckets:
    """Sizes in elements, names as in ``zero_optimization``."""

    reduce_bucket_size: int = 500_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    overlap_comm: bool = True
    pin_memory: bool = True
    buffer_count: int = 4
    pin_parameters: bool = True
    param_buffer_count: int = 5
    param_buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000


def read_buckets(zero: Mapping[str, Any], hidden_size: int) -> Buckets:
    """Return the sizes in the ``zero_optimization`` section of a DeepSpeed file."""
    auto = auto_sizes(hidden_size)
    optimizer, parameters = zero.get("offload_optimizer") or {}, zero.get("offload_param") or {}
    given = {name: zero[name] for name, value in vars(Buckets()).items() if type(value) is int and name in zero}
    given |= {"buffer_count": optimizer["buffer_count"]} if "buffer_count" in optimizer else {}
    names = {"param_buffer_count": "buffer_count", "param_buffer_size": "buffer_size", "max_in_cpu": "max_in_cpu"}
    given |= {name: parameters[key] for name, key in names.items() if key in parameters}
    return Buckets(
        **{name: int(auto[name] if value == "auto" else value) for name, value in given.items()},
        overlap_comm=bool(zero.get("overlap_comm", zero.get("stage") == 3)),
        pin_memory=bool(optimizer.get("pin_memory", True)),
        pin_parameters=bool(parameters.get("pin_memory", True)),
    )


def zero_optimization(choice: Choice, model: Model, cluster: Cluster, nvme_folder: str) -> dict[str, Any]:
    """Return the ``zero_optimization`` section, computed from the sizes of the model and the node."""
    engine, auto = choice.spec, auto_sizes(model.hidden_size)
    values: dict[str, Any] = {
        "stage": engine.zero_stage,
        "overlap_comm": not cluster.is_cpu,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": reduce_bucket_size(choice, model, cluster),
    }
    values |= _stage3(choice, auto, cluster) if engine.zero_stage == 3 else {"allgather_bucket_size": 500_000_000}
    if engine.zero_stage == 3 and model.leaf_classes:
        values["leaf_module"] = {"classes": list(model.leaf_classes)}
    if engine.offload_optimizer:
        buffers = {"buffer_count": ADAM_STATES, "pipeline_read": False, "pipeline_write": False, "fast_init": False}
        values["offload_optimizer"] = _offload(engine.offload_optimizer, cluster, nvme_folder, buffers)
    if engine.offload_param:
        size, most = param_buffer_size(choice, model), min(1_000_000_000, ram_share(choice, cluster) // 2)  # in 16 bits
        buffers = {"buffer_count": 5, "buffer_size": size, "max_in_cpu": most}
        values["offload_param"] = _offload(engine.offload_param, cluster, nvme_folder, buffers)
    return values


def auto_sizes(hidden_size: int) -> dict[str, int]:
    """Return the elements that Trainer fills in for "auto": reduced at once, prefetched, and kept unsharded.

    The reduce bucket is h squared; DeepSpeed's default takes 1 GB in bf16. The threshold covers norms and biases.
    """
    return {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }


def reduce_bucket_size(choice: Choice, model: Model, cluster: Cluster) -> int:
    """Return the elements that DeepSpeed reduces at once; between nodes at least `BETWEEN_NODES`.

    Trainer's size is 8 MB for a hidden size of 2048. It is right within a node; on a network of hundreds of Gbit/s the
    latency of each collective would exceed its transfer. The two buckets take at most a part of the GPU's memory, and
    no more than the model has parameters.
    """
    size = auto_sizes(model.hidden_size)["reduce_bucket_size"]
    if cluster.is_cpu or choice.nodes == 1:
        return size
    room = from_cluster(cluster).gpu_memory // BUCKET_SHARE // (2 * BYTES[choice.precision])
    return max(size, min(BETWEEN_NODES, room, model.parameters))


def _stage3(choice: Choice, auto: Mapping[str, int], cluster: Cluster) -> dict[str, Any]:
    on_nvme = choice.spec.offload_optimizer == "nvme"
    return {
        "stage3_prefetch_bucket_size": auto["stage3_prefetch_bucket_size"],
        "stage3_param_persistence_threshold": auto["stage3_param_persistence_threshold"],
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        "sub_group_size": swapped_sub_group_size(choice, cluster) if on_nvme else 1_000_000_000,
        "stage3_gather_16bit_weights_on_model_save": False,
        **({"zero_hpz_partition_size": choice.processes_per_node} if choice.spec.hpz else {}),
    }


def swapped_sub_group_size(choice: Choice, cluster: Cluster) -> int:
    """Return the elements of one optimizer sub-group, by its fp32 swap buffers.

    DeepSpeed holds `ADAM_STATES` buffers of one sub-group per rank. Beyond 1e8 a larger group reads no faster.
    """
    return max(1_000_000, min(100_000_000, ram_share(choice, cluster) // (4 * ADAM_STATES)))


def ram_share(choice: Choice, cluster: Cluster) -> int:
    """Return the bytes that a rank's swap buffers, or its parameters in RAM, take at most: an eighth of its RAM."""
    return int(cluster.memory_gib_per_node * GIB) // choice.processes_per_node // 8


def _offload(device: Device, cluster: Cluster, nvme_folder: str, buffers: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section ``offload_...``; ``buffers`` applies to NVMe."""
    values = {"device": device, "pin_memory": not cluster.is_cpu}
    return {**values, "nvme_path": nvme_folder, **buffers} if device == "nvme" else values


def param_buffer_size(choice: Choice, model: Model) -> int:
    """Return the elements of one swap buffer, which must hold a rank's part of the largest tensor."""
    return ceil(ceil(model.largest_tensor / choice.world_size) / 4096) * 4096


BETWEEN_NODES: Final = 50_000_000
"""Elements of a bucket that is reduced between nodes: 100 MB in 16 bits."""
BUCKET_SHARE: Final = 256
"""Buckets take at most this part of the GPU's memory."""
ADAM_STATES: Final = 4
"""Values that DeepSpeed swaps per element with Adam: parameter, gradient, momentum, variance."""
