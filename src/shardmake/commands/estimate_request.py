"""The options of ``shardmake estimate``, one field each, and their limits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from typer import Argument, Option

from shardmake.config import models
from shardmake.config.accelerators import find_accelerator
from shardmake.config.attention import Attention
from shardmake.config.methods import DEFAULT_METHOD
from shardmake.config.optimizers import DEFAULT_OPTIMIZER
from shardmake.core.errors import ConfigError, nearest

LARGEST_GPU = 1024  # GiB; more than that is MiB written by mistake
LARGEST_HOST = 64 * 1024  # GiB


@dataclass(frozen=True)
class EstimateRequest:
    """The options of ``shardmake estimate``; sizes in GiB."""

    model: Annotated[str, Argument(help="Hub id, model folder, or config.json.")] = ""
    nodes: Annotated[int, Option(help="Nodes.")] = 1
    gpus_per_node: Annotated[int, Option(help="GPUs per node.")] = 8
    gpu_memory: Annotated[float | None, Option(help="Memory of a GPU, GiB. Default: that of the accelerator.")] = None
    sequence_length: Annotated[
        int | None, Option(help="Tokens per sequence. Default: 4096, or the model's positions if fewer.")
    ] = None
    micro_batch: Annotated[int, Option(help="Sequences per GPU and forward pass.")] = 1
    strategies: Annotated[Sequence[str], Option("--strategy", help="Strategy; may be repeated. Default: all.")] = ()
    gradient_checkpointing: Annotated[bool | None, Option(help="With or without. Default: both.")] = None
    sequence_parallel: Annotated[int, Option(help="GPUs that share each sequence.")] = 1
    tensor_parallel: Annotated[int, Option(help="GPUs that share each matrix, under zero1 or zero2.")] = 1
    expert_parallel: Annotated[int, Option(help="GPUs that share the experts of each layer, under fsdp.")] = 1
    activation_offload: Annotated[
        bool, Option("--activation-offload", help="Hold the inputs of checkpointed layers in host memory.")
    ] = False
    attention: Annotated[
        Attention | None, Option(help="Attention kernel. Default: the fastest that model and GPU support.")
    ] = None
    precision: Annotated[models.Precision, Option(help="Compute data type.")] = "bf16"
    optimizer: Annotated[models.Optimizer, Option(help="Optimizer.", metavar="NAME")] = DEFAULT_OPTIMIZER
    method: Annotated[models.Method, Option(help="What is trained.")] = DEFAULT_METHOD
    lora_rank: Annotated[int, Option(help="Rank of the adapters.")] = 16
    lora_targets: Annotated[str, Option(help="Layers with adapters, such as q_proj,v_proj.")] = "all-linear"
    lora_dropout: Annotated[float, Option(help="Dropout before the adapters.")] = 0.0
    accumulation: Annotated[int, Option(help="Micro batches per optimizer step.")] = 1
    weights: Annotated[Literal["bf16", "fp32"] | None, Option(help="Data type of the trainable weights.")] = None
    gradient_dtype: Annotated[
        models.GradientDtype, Option(help="Type in which gradients are accumulated and reduced.")
    ] = "auto"
    loss: Annotated[Literal["plain", "fused", "chunked"], Option(help="Cross entropy.")] = "plain"
    objective: Annotated[models.Objective, Option(help="What training optimizes.")] = "sft"
    reference: Annotated[
        Literal["model", "precomputed"] | None,
        Option(help="Reference of --objective dpo or kto. Default: model, which is beside the other."),
    ] = None
    host_memory: Annotated[float | None, Option(help="RAM of a node, GiB. Default: no limit.")] = None
    accelerator: Annotated[str, Option(help="GPU model, for its memory and speed.")] = "a100-80gb"
    revision: Annotated[str | None, Option(help="Revision of a hub model.")] = None
    trust_remote_code: Annotated[bool, Option(help="Run model code that comes with the model.")] = False
    probe: Annotated[
        bool, Option("--probe", help="Measure context, NCCL and stream pools on this machine's GPU first.")
    ] = False
    deepspeed_config: Annotated[
        str | None, Option(help="Your own DeepSpeed file; its stage, offload and sizes count.")
    ] = None
    inter_node_gbps: Annotated[
        float | None, Option(help="Network of a node, GB/s. Default: that of a cluster file.")
    ] = None


_COUNTS: dict[str, tuple[type[models.Section], str]] = {
    "nodes": (models.Cluster, "max_nodes"),
    "gpus_per_node": (models.Cluster, "processes_per_node"),
    "sequence_length": (models.Run, "sequence_length"),
    "micro_batch": (models.Run, "global_batch_size"),
    "sequence_parallel": (models.Run, "sequence_parallel"),
    "tensor_parallel": (models.Run, "tensor_parallel"),
    "expert_parallel": (models.Run, "expert_parallel"),
    "lora_rank": (models.Lora, "rank"),
    "accumulation": (models.Run, "global_batch_size"),
}
"""The key of the configuration that limits each option."""


def check_options(request: EstimateRequest) -> None:
    """Raise a `ConfigError` for an option with a value that cannot be used, before the model is read."""
    if not request.model:
        raise ConfigError("No model is named. Name a hub id, a model folder or a config.json.")
    for name, (section, field) in _COUNTS.items():
        value, limits = getattr(request, name), section.model_fields[field].metadata
        largest = next(limit.le for limit in limits if hasattr(limit, "le"))
        if value is not None and not 1 <= value <= largest:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}. Write a number from 1 to {largest:,}.")
    for name in request.strategies:
        if name not in models.STRATEGIES:
            known = models.STRATEGIES
            raise ConfigError(f"There is no strategy {name!r}.{nearest(name, known)} Strategies: {', '.join(known)}.")
    try:
        find_accelerator(request.accelerator)
    except ConfigError as error:
        raise ConfigError(f"--accelerator: {error}") from None
    if request.gpu_memory is not None and math.isfinite(request.gpu_memory) and request.gpu_memory > LARGEST_GPU:
        raise ConfigError(
            f"--gpu-memory {request.gpu_memory:g} is in GiB, and no GPU has that much. "
            f"If that were MiB, write {request.gpu_memory / 1024:.4g}."
        )
    if request.host_memory is not None and not 0 < request.host_memory <= LARGEST_HOST:
        raise ConfigError(f"--host-memory is {request.host_memory:g}; give the RAM of one node in GiB, such as 512.")
    if request.gpu_memory is not None and not 1 <= request.gpu_memory < math.inf:
        raise ConfigError(f"--gpu-memory is {request.gpu_memory:g}; give the memory of one GPU in GiB, such as 80.")
