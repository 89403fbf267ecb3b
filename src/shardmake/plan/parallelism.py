"""Tensor, sequence and expert parallelism: the runs that cannot use them, and the experts that one rank holds."""

from collections.abc import Iterator
from importlib.metadata import version
from itertools import chain

from shardmake.config.attention import Attention
from shardmake.config.models import Cluster, Precision, Run
from shardmake.config.optimizers import DEFAULT_OPTIMIZER
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.memory.model import Model, expert_count, selected_experts, with_experts
from shardmake.memory.parameter_inventory import parse_config
from shardmake.memory.read_config import from_config
from shardmake.plan.abilities import attends_in_kernel, parallel_styles
from shardmake.plan.refusals import together

AUTOTP_STYLES = frozenset({
    "colwise", "colwise_rep", "colwise_gather_output", "rowwise", "replicated_with_grad_allreduce", "embedding_rowwise"
})  # fmt: skip
"""Styles of transformers' tensor-parallel plans that DeepSpeed's AutoTP takes; it stops at every other one."""


def wrong_tensor_parallel(run: Run, cluster: Cluster, model: Model) -> Iterator[str]:
    """Yield one message if this run, cluster or model cannot use its ``tensor_parallel``."""
    if run.tensor_parallel > 1:
        yield from together(f"tensor_parallel: {run.tensor_parallel}", _not_tensor_parallel(run, cluster, model))


def _not_tensor_parallel(run: Run, cluster: Cluster, model: Model) -> Iterator[str]:
    spec = STRATEGY_SPECS.get(run.strategy)
    if spec is not None and not spec.tensor_parallel:
        yield f"strategy {run.strategy}: take zero1 or zero2 (DeepSpeed AutoTP), or fsdp with a script of your own."
    elif spec is not None and spec.is_fsdp and run.script is None:
        yield (
            f"strategy {run.strategy}: transformers shards a model for it at loading and then cannot save the "
            "optimizer, so a run could not be resumed. Take zero1 or zero2, or a script that loads its own model."
        )
    for key in ("freeze", "learning_rates"):
        if getattr(run, key):
            yield f"{key}: it is not tested with sharded matrices. Remove one of them."
    if run.method_spec.has_adapters:
        yield f"method {run.method}: adapters on sharded matrices are not merged here. Take method: full."
    yield from _wrong_ranks(run.tensor_parallel, cluster)
    yield from _wrong_heads(run.tensor_parallel, model)
    styles = parallel_styles(model.model_type, "tp")
    if not styles:
        yield f"transformers has no tensor-parallel plan for {model.model_type}."
    unknown = sorted(styles - AUTOTP_STYLES)
    if (spec is None or spec.is_deepspeed) and unknown:
        yield (
            f"transformers' tensor-parallel plan for {model.model_type} has {', '.join(unknown)}, at which DeepSpeed's "
            "AutoTP stops. Take tensor_parallel: 1; ZeRO-3 and FSDP shard every weight."
        )


def _wrong_ranks(size: int, cluster: Cluster) -> Iterator[str]:
    """Yield why groups of ``size`` ranks would not be within nodes."""
    if cluster.processes_per_node % size:
        yield f"a group is within a node, and {cluster.processes_per_node} ranks per node are not a multiple of {size}."


def _wrong_heads(size: int, model: Model) -> Iterator[str]:
    for name, count in attention_heads(model).items():
        if count % size:
            yield f"{model.architecture} has {count} {name} heads, which {size} ranks cannot share evenly."


def attention_heads(model: Model) -> dict[str, int]:
    """Return the numbers of attention and of key-value heads.

    Where config.json leaves the second out, its default is that of the model's type: 8 for Mistral, for example.
    """
    if model.decoder is not None:
        return {"attention": model.decoder.a, "key-value": model.decoder.k}
    config = parse_config(model.config, model.source, model.trust_remote_code).get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 0
    return {"attention": heads, "key-value": getattr(config, "num_key_value_heads", None) or heads}


def wrong_sequence_parallel(run: Run, cluster: Cluster, model: Model, attention: Attention) -> Iterator[str]:
    """Yield one message if this run, cluster, model or attention kernel cannot use ``sequence_parallel``."""
    if run.sequence_parallel > 1:
        wrong = chain(_not_sequence_parallel(run, cluster, model), _wrong_tokens(run, model, attention))
        yield from together(f"sequence_parallel: {run.sequence_parallel}", wrong)


def _not_sequence_parallel(run: Run, cluster: Cluster, model: Model) -> Iterator[str]:
    size = run.sequence_parallel
    if run.strategy != "auto" and not STRATEGY_SPECS[run.strategy].sequence_parallel:
        others = [name for name, spec in STRATEGY_SPECS.items() if spec.sequence_parallel]
        yield f"strategy {run.strategy}: it is not tested. Take auto, or one of {', '.join(others)}."
    if run.script is not None:
        yield "script: the training code must give each rank its part of a sequence. Remove script."
    if run.tensor_parallel > 1:
        yield f"tensor_parallel {run.tensor_parallel}: a rank is in one kind of group. Set tensor_parallel: 1."
    if run.torch_compile:
        yield "torch_compile: the exchange of the heads is not tested in compiled code. Set torch_compile: false."
    asked = {"eval_every_steps": isinstance(run.eval_every_steps, int)}
    asked |= {f"checkpoints.{name}": bool(getattr(run.checkpoints, name)) for name in ("keep_best", "early_stopping")}
    for key in (key for key in asked if asked[key]):
        yield (
            f"{key}: Trainer weights the evaluation losses of the ranks alike, but their parts of a sequence "
            "have different numbers of tokens with loss. Remove it; the evaluate stage evaluates the result."
        )
    yield from _wrong_ranks(size, cluster)
    if run.sequence_length % size:
        yield f"sequence_length {run.sequence_length} is not a multiple of {size}. Use one that is."
    yield from _wrong_heads(size, model)


def _wrong_tokens(run: Run, model: Model, attention: Attention) -> Iterator[str]:
    """Yield why a rank's tokens would be attended to as if they were all."""
    if not attends_in_kernel(model):
        yield (
            f"model {model.architecture}: a small model of its kind did not show that tokens meet in the attention "
            "kernel alone, with heads that ranks can share. Take another model."
        )
    if attention == "eager":
        yield "attention eager: its mask has a number for each pair of tokens. Take varlen, flash or sdpa."
    if attention == "sdpa" and run.packing:
        yield (
            "packing with attention sdpa: the mask that separates packed examples is made for a rank's own tokens. "
            "Take attention: varlen on a GPU, or packing: false."
        )
    text = model.text_config
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    if attention == "sdpa" and window and int(window) < run.sequence_length:
        yield (
            f"attention sdpa: the mask of a sliding window of {int(window)} tokens is made for a rank's own tokens. "
            "Take attention: varlen on a GPU."
        )


def wrong_expert_parallel(run: Run, cluster: Cluster, model: Model, precision: Precision) -> Iterator[str]:
    """Yield one message if this run, cluster or model cannot use its ``expert_parallel``."""
    if run.expert_parallel > 1:
        yield from together(
            f"expert_parallel: {run.expert_parallel}", _not_expert_parallel(run, cluster, model, precision)
        )


def _not_expert_parallel(run: Run, cluster: Cluster, model: Model, precision: Precision) -> Iterator[str]:
    if run.strategy != "auto" and not STRATEGY_SPECS[run.strategy].expert_parallel:
        yield f"strategy {run.strategy}: transformers spreads experts under FSDP2 alone. Take fsdp."
    if run.strategy == "auto" and cluster.is_cpu:
        yield "accelerator cpu: Accelerate ignores FSDP without GPUs. Set expert_parallel: 1."
    if run.method_spec.has_adapters:
        yield f"method {run.method}: adapters on sharded experts are not merged here. Take method: full."
    if run.optimizer != DEFAULT_OPTIMIZER:
        yield f"optimizer {run.optimizer}: only {DEFAULT_OPTIMIZER} is compared with DDP. Take it."
    if precision == "fp16":
        yield "precision fp16: the scale of the loss is not tested with spread experts. Take bf16."
    if run.loss != "plain":
        yield f"loss {run.loss}: it is not tested with spread experts. Set loss: plain."
    untested = ("script", "torch_compile", "freeze", "learning_rates", "activation_offload", "accelerate_config")
    for key in (key for key in untested if getattr(run, key)):
        yield f"{key}: it is not tested with spread experts. Remove one of them."
    for key in ("tensor_parallel", "sequence_parallel"):
        if getattr(run, key) > 1:
            yield f"{key} {getattr(run, key)}: a rank is in one kind of group. Set {key}: 1."
    yield from _wrong_ranks(run.expert_parallel, cluster)
    if "ep_dispatch_experts" not in parallel_styles(model.model_type, "ep"):
        yield f"transformers {version('transformers')} has no expert-parallel plan for {model.model_type}."
    elif not divides_experts(model, ranks := (run.nodes or 1) * cluster.processes_per_node):
        count = expert_count(model) or "an unknown number of"
        yield f"{model.architecture} has {count} experts per layer, which {ranks} ranks cannot share evenly."


def divides_experts(model: Model, ranks: int) -> bool:
    """Return True if ``ranks`` can have equal parts of each layer's experts; Accelerate mixes up empty parts."""
    experts = expert_count(model)
    return experts is not None and experts % ranks == 0


def local_model(model: Model, ranks: int) -> Model | None:
    """Return ``model`` with the experts of one of ``ranks``, at least those of a token; None if a rank has all."""
    experts = expert_count(model)
    if ranks == 1 or experts is None:
        return None
    return from_config(with_experts(model.config, max(experts // ranks, selected_experts(model))), source=model.source)
