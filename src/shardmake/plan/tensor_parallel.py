"""Checks of tensor parallelism, which shares each layer's matrices between ranks (docs/how-to/tensor-parallel.md)."""

from collections.abc import Iterator

from shardmake.config.models import Cluster, Run
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core.errors import ConfigError
from shardmake.memory.model import Model


def check_tensor_parallel(run: Run, cluster: Cluster, model: Model) -> None:
    """Raise a `ConfigError` if this run, cluster or model cannot use its ``tensor_parallel``."""
    size = run.tensor_parallel
    if size == 1:
        return
    wrong = [*_wrong_run(run), *_wrong_sizes(size, cluster, model)]
    if wrong:
        raise ConfigError(
            "\n".join([f"tensor_parallel: {size} cannot be used with this run:", *(f"  {w}" for w in wrong)])
        )


def _wrong_run(run: Run) -> Iterator[str]:
    spec = STRATEGY_SPECS.get(run.strategy)
    if spec is None or not spec.tensor_parallel:
        yield f"strategy {run.strategy}: take zero1 or zero2 (DeepSpeed AutoTP), or fsdp with a script of your own."
    elif spec.is_fsdp:
        if run.script is None:
            yield (
                f"strategy {run.strategy}: transformers shards a model for it at loading and then cannot save the "
                "optimizer, so a run could not be resumed. Take zero1 or zero2, or a script that loads its own model."
            )
        if run.fsdp_version == 1:
            yield "fsdp_version 1: only FSDP2 takes a tensor-parallel mesh."
    if run.method != "full":
        yield f"method {run.method}: adapters on sharded matrices are not merged here. Take method: full."
    if run.engine == "loop":
        yield "engine loop: it does not support tensor parallelism. Take engine: trainer."


def _wrong_sizes(size: int, cluster: Cluster, model: Model) -> Iterator[str]:
    from transformers import CONFIG_MAPPING

    if cluster.processes_per_node % size:
        yield f"a group is within a node, and {cluster.processes_per_node} ranks per node are not a multiple of {size}."
    heads = model.config.get("num_attention_heads", 0)
    for name, count in (("attention", heads), ("key-value", model.config.get("num_key_value_heads") or heads)):
        if count % size:
            yield f"{model.architecture} has {count} {name} heads, which {size} ranks cannot share evenly."
    if model.model_type not in CONFIG_MAPPING or not CONFIG_MAPPING[model.model_type].base_model_tp_plan:
        yield f"transformers has no tensor-parallel plan for {model.model_type}."
