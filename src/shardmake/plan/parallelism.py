"""Tensor, sequence and expert parallelism: the runs that cannot use them, and the experts that one rank holds."""

from collections.abc import Iterator
from importlib.metadata import version

from shardmake.config.attention import Attention
from shardmake.config.models import Cluster, Precision, Run
from shardmake.config.optimizers import DEFAULT_OPTIMIZER
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.memory.model import Model, expert_count, selected_experts, with_experts
from shardmake.memory.parameter_inventory import parse_config
from shardmake.memory.read_config import from_config
from shardmake.plan.abilities import attends_in_kernel, parallel_styles
from shardmake.plan.refusals import applying, together

AUTOTP_STYLES = frozenset({
    "colwise", "colwise_rep", "colwise_gather_output", "rowwise", "replicated_with_grad_allreduce", "embedding_rowwise"
})  # fmt: skip
"""Styles of transformers' tensor-parallel plans that DeepSpeed's AutoTP takes; it stops at every other one."""
Rows = Iterator[tuple[object, str]]
"""Reasons, each after a value that is true if it applies."""


def wrong_tensor_parallel(run: Run, cluster: Cluster, model: Model) -> Iterator[str]:
    """Yield one message if this run, cluster or model cannot use its ``tensor_parallel``."""
    if (size := run.tensor_parallel) == 1:
        return
    spec, named = STRATEGY_SPECS.get(run.strategy), f"strategy {run.strategy}"
    styles = parallel_styles(model.model_type, "tp")
    unknown = sorted(styles - AUTOTP_STYLES) if spec is None or spec.is_deepspeed else []
    yield from together(f"tensor_parallel: {size}", applying(
        (spec and not spec.tensor_parallel,
         f"{named}: take zero1 or zero2 (DeepSpeed AutoTP), or fsdp with a script of your own."),
        (spec and spec.tensor_parallel and spec.is_fsdp and run.script is None,
         f"{named}: transformers shards a model for it at loading and then cannot save the optimizer, so a run could "
         "not be resumed. Take zero1 or zero2, or a script that loads its own model."),
        *_untested(run, "sharded matrices", "freeze", "learning_rates"),
        (run.method_spec.has_adapters,
         f"method {run.method}: adapters on sharded matrices are not merged here. Take method: full."),
        *_wrong_ranks(size, cluster),
        *_wrong_heads(size, model),
        (not styles, f"transformers has no tensor-parallel plan for {model.model_type}."),
        (unknown,
         f"transformers' tensor-parallel plan for {model.model_type} has {', '.join(unknown)}, at which DeepSpeed's "
         "AutoTP stops. Take tensor_parallel: 1; ZeRO-3 and FSDP shard every weight."),
    ))  # fmt: skip


def _untested(run: Run, what: str, *keys: str) -> Rows:
    return ((getattr(run, key), f"{key}: it is not tested with {what}. Remove one of them.") for key in keys)


def _other_groups(run: Run, *keys: str) -> Rows:
    sizes = {key: getattr(run, key) for key in keys}
    return ((n > 1, f"{key} {n}: a rank is in one kind of group. Set {key}: 1.") for key, n in sizes.items())


def _wrong_ranks(size: int, cluster: Cluster) -> Rows:
    ranks = cluster.processes_per_node
    yield ranks % size, f"a group is within a node, and {ranks} ranks per node are not a multiple of {size}."


def _wrong_heads(size: int, model: Model) -> Rows:
    for name, count in attention_heads(model).items():
        yield count % size, f"{model.architecture} has {count} {name} heads, which {size} ranks cannot share evenly."


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
    if (size := run.sequence_parallel) == 1:
        return
    others = [name for name, spec in STRATEGY_SPECS.items() if spec.sequence_parallel]
    evaluated = {
        "eval_every_steps": isinstance(run.eval_every_steps, int),
        "checkpoints.keep_best": run.checkpoints.keep_best,
        "checkpoints.early_stopping": run.checkpoints.early_stopping,
    }
    text = model.text_config
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    yield from together(f"sequence_parallel: {size}", applying(
        (run.strategy not in ("auto", *others),
         f"strategy {run.strategy}: it is not tested. Take auto, or one of {', '.join(others)}."),
        (run.script, "script: the training code must give each rank its part of a sequence. Remove script."),
        *_other_groups(run, "tensor_parallel"),
        (run.torch_compile,
         "torch_compile: the exchange of the heads is not tested in compiled code. Set torch_compile: false."),
        *((value, f"{key}: Trainer weights the evaluation losses of the ranks alike, but their parts of a sequence "
           "have different numbers of tokens with loss. Remove it; the evaluate stage evaluates the result.")
          for key, value in evaluated.items()),
        *_wrong_ranks(size, cluster),
        (run.sequence_length % size,
         f"sequence_length {run.sequence_length} is not a multiple of {size}. Use one that is."),
        *_wrong_heads(size, model),
        (not attends_in_kernel(model),
         f"model {model.architecture}: a small model of its kind did not show that tokens meet in the attention kernel "
         "alone, with heads that ranks can share. Take another model."),
        (attention == "eager",
         "attention eager: its mask has a number for each pair of tokens. Take varlen, flash or sdpa."),
        (attention == "sdpa" and run.packing,
         "packing with attention sdpa: the mask that separates packed examples is made for a rank's own tokens. Take "
         "attention: varlen on a GPU, or packing: false."),
        (attention == "sdpa" and window and int(window) < run.sequence_length,
         f"attention sdpa: the mask of a sliding window of {window} tokens is made for a rank's own tokens. Take "
         "attention: varlen on a GPU."),
    ))  # fmt: skip


def wrong_expert_parallel(run: Run, cluster: Cluster, model: Model, precision: Precision) -> Iterator[str]:
    """Yield one message if this run, cluster or model cannot use its ``expert_parallel``."""
    if (size := run.expert_parallel) == 1:
        return
    is_auto, ranks = run.strategy == "auto", (run.nodes or 1) * cluster.processes_per_node
    spreads = "ep_dispatch_experts" in parallel_styles(model.model_type, "ep")
    untested = ("script", "torch_compile", "freeze", "learning_rates", "activation_offload", "accelerate_config")
    yield from together(f"expert_parallel: {size}", applying(
        (not is_auto and not STRATEGY_SPECS[run.strategy].expert_parallel,
         f"strategy {run.strategy}: transformers spreads experts under FSDP2 alone. Take fsdp."),
        (is_auto and cluster.is_cpu,
         "accelerator cpu: Accelerate ignores FSDP without GPUs. Set expert_parallel: 1."),
        (run.method_spec.has_adapters,
         f"method {run.method}: adapters on sharded experts are not merged here. Take method: full."),
        (run.optimizer != DEFAULT_OPTIMIZER,
         f"optimizer {run.optimizer}: only {DEFAULT_OPTIMIZER} is compared with DDP. Take it."),
        (precision == "fp16", "precision fp16: the scale of the loss is not tested with spread experts. Take bf16."),
        (run.loss != "plain", f"loss {run.loss}: it is not tested with spread experts. Set loss: plain."),
        *_untested(run, "spread experts", *untested),
        *_other_groups(run, "tensor_parallel", "sequence_parallel"),
        *_wrong_ranks(size, cluster),
        (not spreads, f"transformers {version('transformers')} has no expert-parallel plan for {model.model_type}."),
        (spreads and not divides_experts(model, ranks),
         f"{model.architecture} has {expert_count(model) or 'an unknown number of'} experts per layer, which {ranks} "
         "ranks cannot share evenly."),
    ))  # fmt: skip


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
