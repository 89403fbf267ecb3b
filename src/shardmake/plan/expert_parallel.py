"""Expert parallelism: the runs that cannot use it, and the model that one rank holds."""

from collections.abc import Iterator
from importlib.metadata import version

from shardmake.config.models import Cluster, Precision, Run
from shardmake.config.optimizers import DEFAULT_OPTIMIZER
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.memory.model import Model, expert_count, selected_experts, with_experts
from shardmake.memory.read_config import from_config
from shardmake.plan.abilities import parallel_styles
from shardmake.plan.refusals import together, wrong_ranks


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
    yield from wrong_ranks(run.expert_parallel, cluster)
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
