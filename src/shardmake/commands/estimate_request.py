"""The options of ``shardmake estimate``, one field each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from typer import Argument, Option

from shardmake.config.attention import Attention
from shardmake.config.choices import GradientDtype, Method, Objective, Optimizer, Precision
from shardmake.config.methods import DEFAULT_METHOD
from shardmake.config.optimizers import DEFAULT_OPTIMIZER


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
    precision: Annotated[Precision, Option(help="Compute data type.")] = "bf16"
    optimizer: Annotated[Optimizer, Option(help="Optimizer.", metavar="NAME")] = DEFAULT_OPTIMIZER
    method: Annotated[Method, Option(help="What is trained.")] = DEFAULT_METHOD
    lora_rank: Annotated[int, Option(help="Rank of the adapters.")] = 16
    lora_targets: Annotated[str, Option(help="Layers with adapters, such as q_proj,v_proj.")] = "all-linear"
    lora_dropout: Annotated[float, Option(help="Dropout before the adapters.")] = 0.0
    accumulation: Annotated[int, Option(help="Micro batches per optimizer step.")] = 1
    weights: Annotated[Literal["bf16", "fp32"] | None, Option(help="Data type of the trainable weights.")] = None
    gradient_dtype: Annotated[GradientDtype, Option(help="Type in which gradients are accumulated and reduced.")] = (
        "auto"
    )
    loss: Annotated[Literal["plain", "fused", "chunked"], Option(help="Cross entropy.")] = "plain"
    objective: Annotated[Objective, Option(help="What training optimizes.")] = "sft"
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
