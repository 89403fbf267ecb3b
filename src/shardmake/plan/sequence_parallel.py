"""Runs, clusters and models that sequence parallelism refuses (docs/how-to/parallelism.md)."""

from collections.abc import Iterator, Mapping
from typing import Any

from shardmake.config.attention import Attention
from shardmake.config.models import Cluster, Run
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core.errors import ConfigError
from shardmake.memory.model import Model
from shardmake.memory.parameter_inventory import parse_config


def check_sequence_parallel(run: Run, cluster: Cluster, model: Model, attention: Attention) -> None:
    """Raise a `ConfigError` if this run, cluster, model or attention kernel cannot use ``sequence_parallel``."""
    size = run.sequence_parallel
    if size == 1:
        return
    wrong = [*_wrong_run(run), *_wrong_sizes(run, cluster, model), *_wrong_model(run, model, attention)]
    if wrong:
        raise ConfigError(
            "\n".join([f"sequence_parallel: {size} cannot be used with this run:", *(f"  {w}" for w in wrong)])
        )


def _wrong_run(run: Run) -> Iterator[str]:
    if run.strategy != "auto" and not STRATEGY_SPECS[run.strategy].sequence_parallel:
        others = [name for name, spec in STRATEGY_SPECS.items() if spec.sequence_parallel]
        yield f"strategy {run.strategy}: only ZeRO is compared with DDP. Take auto, or one of {', '.join(others)}."
    if run.script is not None:
        yield "script: the training code must give each rank its part of a sequence. Remove script."
    if run.tensor_parallel > 1:
        yield f"tensor_parallel {run.tensor_parallel}: a rank is in one kind of group. Set tensor_parallel: 1."
    if run.torch_compile:
        yield "torch_compile: the exchange of the heads is not tested in compiled code. Set torch_compile: false."
    if run.eval_every_steps is not None:
        yield (
            "eval_every_steps: Trainer weights the evaluation losses of the ranks alike, but their parts of a sequence "
            "have different numbers of tokens with loss. Remove it; the evaluate stage evaluates the result."
        )


def _wrong_sizes(run: Run, cluster: Cluster, model: Model) -> Iterator[str]:
    size = run.sequence_parallel
    if cluster.processes_per_node % size:
        yield f"a group is within a node, and {cluster.processes_per_node} ranks per node are not a multiple of {size}."
    if run.sequence_length % size:
        yield f"sequence_length {run.sequence_length} is not a multiple of {size}. Use one that is."
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


def _wrong_model(run: Run, model: Model, attention: Attention) -> Iterator[str]:
    if model.decoder is None:
        yield (
            f"model {model.architecture}: that its layers exchange tokens in the attention kernel alone is known only "
            "of the Llama, Mistral, Qwen and Gemma families. Take another model."
        )
    if attention == "eager":
        yield "attention eager: its mask has a number for each pair of tokens. Take varlen, flash or sdpa."
    if attention == "sdpa" and run.packing:
        yield (
            "packing with attention sdpa: the mask that separates packed examples is made for a rank's own tokens. "
            "Take attention: varlen on a GPU, or packing: false."
        )
    window = sliding_window(model.config)
    if attention == "sdpa" and window is not None and window < run.sequence_length:
        yield (
            f"attention sdpa: the mask of a sliding window of {window} tokens is made for a rank's own tokens. "
            "Take attention: varlen on a GPU."
        )


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Return the tokens of the attention window in a model's config; None if every layer attends to all tokens."""
    if not config.get("use_sliding_window", True):
        return None
    window = config.get("sliding_window")
    return int(window) if window else None
