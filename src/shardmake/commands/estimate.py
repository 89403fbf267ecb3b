"""``shardmake estimate``: the memory of every strategy for a model on some hardware, as a table or JSON."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardmake.commands.estimate_request import EstimateRequest
from shardmake.config.accelerators import find_accelerator
from shardmake.config.load import parse_section
from shardmake.config.methods import METHODS
from shardmake.config.models import STRATEGIES, Cluster, Lora, Run, Section, Strategy
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.config.user_files import read_user_files
from shardmake.core.environment import library_version
from shardmake.core.errors import ConfigError, ShardmakeError, nearest
from shardmake.core.library_process import one_library_process
from shardmake.core.log import warn_while_slow
from shardmake.core.units import GB, GIB
from shardmake.memory import calibration, states
from shardmake.memory.calibration import Calibration
from shardmake.memory.model import Model, Split
from shardmake.memory.read_config import read_model
from shardmake.plan.abilities import describe_quantized_base
from shardmake.plan.candidates import Candidate, choices
from shardmake.plan.choose import choose, find_choice
from shardmake.plan.fallbacks import find_fallbacks
from shardmake.plan.parallelism import wrong_expert_parallel, wrong_sequence_parallel, wrong_tensor_parallel
from shardmake.plan.planner import CachedPlanner
from shardmake.plan.reasons import memory_and_time, reason_of
from shardmake.plan.refusals import refuse, unsuitable, wrong_activation_offload, wrong_optimizer, wrong_strategy
from shardmake.plan.resolve import ResolvedRun, kernels_of, resolve
from shardmake.plan.suggestions import Kind, changes, shared_by, suggestions
from shardmake.plan.verdict import FAMILY_ERRORS, HOST_ERROR, NO_LIMIT
from shardmake.run.own_files import check_refused

CORES_PER_GPU = 16
DEFAULT_LENGTH = 4096
LARGEST_GPU = 1024  # GiB; more than that is MiB written by mistake
LARGEST_HOST = 64 * 1024  # GiB


@dataclass(frozen=True)
class EstimateResult:
    """Every candidate, and advice if none of them fits."""

    request: EstimateRequest
    model: Model
    split: Split
    rows: tuple[Candidate, ...]
    advice: str | None = None
    measured: Calibration | None = None
    """The probe's measurement on these GPUs."""
    choice: Candidate | None = None
    """The row that the plan takes; None if nothing fits."""
    reason: str = ""
    """Why it takes that row, as the plan says it."""
    traced_tokens: int | None = None
    """Tokens of the traced step, if its bytes were scaled to the sequence."""
    notes: Sequence[str] = ()
    """How a base of quantized weights is counted."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """The numbers that went in, by name."""

    def as_json(self) -> dict[str, Any]:
        """Return the documented JSON object; ``candidates`` holds one object per strategy, sizes in bytes."""
        return {
            "model": self.model.architecture,
            "parameters": self.model.parameters,
            "trainable": self.split.trainable,
            "largest_tensor": self.model.largest_tensor,
            "largest_layer": self.model.largest_block,
            "candidates": [
                {
                    "strategy": row.choice.strategy,
                    "gradient_checkpointing": row.choice.gradient_checkpointing,
                    "nodes": row.choice.nodes,
                    **row.memory.as_json(),
                    "fits": row.fits,
                    "headroom": row.headroom.name.lower() if row.fits else None,
                    "reason": row.reason,
                    "step_seconds": row.step_seconds,
                    "chosen": row is self.choice,
                }
                for row in self.rows
            ],
            "traced_tokens": self.traced_tokens,
            "advice": self.advice,
            "notes": list(self.notes),
            "calibration": self.measured and asdict(self.measured),
        }


@one_library_process()
def estimate(request: EstimateRequest) -> EstimateResult:
    """Estimate each strategy, with and without gradient checkpointing if ``request`` leaves that open."""
    check_options(request)
    settings = resolve_request(request)
    request = replace(request, sequence_length=settings.run.sequence_length)
    if request.probe:
        from shardmake.memory.probe import probe

        calibration.keep(settings.hardware.accelerator.name, probe(settings.model))
    planner = CachedPlanner(settings)
    possible = choices(settings, _strategies(request, settings.run))
    with warn_while_slow("Comparing strategies"):
        rows = planner.simulate_all(sorted(possible, key=lambda choice: not choice.gradient_checkpointing))
    measured = calibration.read(settings.hardware.accelerator.name)
    result = EstimateResult(
        request, settings.model, settings.split, tuple(rows), measured=measured,
        traced_tokens=planner.traced_tokens(rows[0].choice), inputs=_inputs(settings),
        notes=describe_quantized_base(settings.model, settings.run),
    )  # fmt: skip
    if not any(row.fits for row in rows):
        with warn_while_slow("Nothing fits; planning single changes that would"):
            return replace(result, advice=smallest_change(request))
    choice, _ = choose(rows, planner)
    fallbacks, _ = find_fallbacks(choice, rows, planner)
    return replace(result, choice=choice, reason=reason_of(choice, rows, fallbacks))


def _inputs(settings: ResolvedRun) -> dict[str, str]:
    """Return the numbers behind memory, verdicts and seconds, by name."""
    run, hardware, model = settings.run, settings.hardware, settings.model
    accelerator, measured = hardware.accelerator, calibration.read(hardware.accelerator.name)
    context, nccl = (measured.context, measured.nccl) if measured else (None, None)
    return {
        "model": f"{model.parameters:,} parameters, {settings.split.trainable:,} trained, {len(model.blocks)} layers",
        "training": f"{run.objective}, {run.method}, {settings.precision}, {run.optimizer}, attention "
        f"{settings.attention}, loss {run.loss}, {run.micro_batch_size} x {run.sequence_length} tokens per GPU",
        "accelerator": f"{accelerator.name}, {hardware.gpu_memory / GIB:.1f} GiB",
        "peak": f"{hardware.flops(settings.precision) / 1e12:,.0f} TFLOP/s in {settings.precision}, dense",
        "rates": f"{accelerator.bandwidth:,.0f} GB/s GPU memory, {hardware.intra_node / GB:g} GB/s between GPUs of a "
        f"node, {hardware.inter_node / GB:g} GB/s between nodes, {accelerator.host_link:g} GB/s to host RAM",
        "outside PyTorch": f"{(context or states.context_bytes(accelerator.capability)) / GIB:.2f} GiB CUDA context, "
        f"{(states.NCCL if nccl is None else nccl) / GIB:.2f} GiB NCCL ({'probed' if measured else 'published'})",
        **{
            f"error of {error.name} trainings": f"{error.typical:.1%} (median of {error.sample}), 19 in 20 needed at "
            f"most {error.largest:.1%} more"
            for error in (*FAMILY_ERRORS.values(), HOST_ERROR)
        },
        "versions": ", ".join(
            f"{name} {library_version(name)}" for name in ("torch", "transformers", "peft", "deepspeed")
        ),
    }


def resolve_request(request: EstimateRequest) -> ResolvedRun:
    """Return the run and the cluster that ``request`` describes, as the planner takes them."""
    run = _run(request)
    check_refused(read_user_files(run), run)
    cluster = _cluster(request)
    settings = resolve(run, cluster)
    refuse(
        wrong_optimizer(run, settings.model),
        wrong_strategy(run, cluster, settings.precision),
        wrong_activation_offload(run, cluster),
    )
    usable = kernels_of(settings.hardware, settings.precision, run.objective)
    attention = request.attention or settings.abilities.best_attention(usable, packing=False)
    for strategy in request.strategies or ("auto",):
        trained = run.model_copy(update={"strategy": strategy})
        refuse(
            wrong_sequence_parallel(trained, cluster, settings.model, attention),
            wrong_tensor_parallel(trained, cluster, settings.model),
            wrong_expert_parallel(trained, cluster, settings.model, settings.precision),
        )
    return replace(settings, attention=attention, weights=request.weights or "fp32")


def _run(request: EstimateRequest) -> Run:
    targets, checkpointing, length = request.lora_targets, request.gradient_checkpointing, request.sequence_length
    if not length:
        model = read_model(request.model, revision=request.revision, trust_remote_code=request.trust_remote_code)
        length = min(DEFAULT_LENGTH, model.max_positions or DEFAULT_LENGTH)
    shared = request.sequence_parallel * request.tensor_parallel
    groups = max(1, request.nodes * request.gpus_per_node // shared)
    values = {name: value for name, value in vars(request).items() if name in Run.model_fields}
    values |= {
        "data": {"train": "train.jsonl"},
        "sequence_length": length,
        "global_batch_size": groups * request.micro_batch * request.accumulation,
        "micro_batch_size": request.micro_batch,
        "max_steps": 1,
        "learning_rate": 1e-4,
        "attention": request.attention or "auto",
        "gradient_checkpointing": "auto" if checkpointing is None else checkpointing,
        "lora": {
            "rank": request.lora_rank,
            "targets": targets if targets == "all-linear" else [*filter(None, map(str.strip, targets.split(",")))],
            "dropout": request.lora_dropout,
        },
    }
    return parse_section(Run, values | _objective_keys(request), "The options")


def _objective_keys(request: EstimateRequest) -> dict[str, Any]:
    padded = {"packing": False} if OBJECTIVES[request.objective].trl else {}
    if request.reference is None:
        return padded
    if not OBJECTIVES[request.objective].has_reference:
        having = " or ".join(name for name, spec in OBJECTIVES.items() if spec.has_reference)
        raise ConfigError(
            f"--reference has no effect with --objective {request.objective}. Remove it, or take {having}."
        )
    return {**padded, request.objective: {"reference": request.reference}}


def _cluster(request: EstimateRequest) -> Cluster:
    values = {
        "executor": "local", "accelerator": request.accelerator, "gpu_memory_gib": request.gpu_memory,
        "max_nodes": request.nodes, "processes_per_node": request.gpus_per_node,
        "cpus_per_node": CORES_PER_GPU * request.gpus_per_node,
        "memory_gib_per_node": request.host_memory or LARGEST_HOST, "nvme_path": "/nvme",
        **({} if request.inter_node_gbps is None else {"inter_node_gbps": request.inter_node_gbps}),
    }  # fmt: skip
    cluster = parse_section(Cluster, values, "The options")
    return cluster if request.host_memory else cluster.model_copy(update={"memory_gib_per_node": NO_LIMIT / GIB})


def _strategies(request: EstimateRequest, run: Run) -> list[Strategy]:
    """Return the strategies that the user named, in the order of the table; none for all that the planner considers."""
    named = [strategy for strategy in STRATEGIES if strategy in request.strategies]
    refuse(unsuitable(run, strategy) for strategy in named)
    return named


# ---------------------------------------------------------------------------------------------------------------------
# The options


_COUNTS: dict[str, tuple[type[Section], str]] = {
    "nodes": (Cluster, "max_nodes"),
    "gpus_per_node": (Cluster, "processes_per_node"),
    "sequence_length": (Run, "sequence_length"),
    "micro_batch": (Run, "global_batch_size"),
    "sequence_parallel": (Run, "sequence_parallel"),
    "tensor_parallel": (Run, "tensor_parallel"),
    "expert_parallel": (Run, "expert_parallel"),
    "lora_rank": (Lora, "rank"),
    "accumulation": (Run, "global_batch_size"),
}
"""The key of the configuration that limits each option."""


def check_options(request: EstimateRequest) -> None:
    """Raise a `ConfigError` for an option with a value that cannot be used, before the model is read."""
    if not request.model:
        raise ConfigError("No model is named. Name a hub id, a model folder or a config.json.")
    for name, (section, key) in _COUNTS.items():
        value, limits = getattr(request, name), section.model_fields[key].metadata
        largest = next(limit.le for limit in limits if hasattr(limit, "le"))
        if value is not None and not 1 <= value <= largest:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}. Write a number from 1 to {largest:,}.")
    for name in request.strategies:
        if name not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise ConfigError(f"There is no strategy {name!r}.{nearest(name, STRATEGIES)} Strategies: {known}.")
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


# ---------------------------------------------------------------------------------------------------------------------
# The smallest change that would fit


def smallest_change(request: EstimateRequest) -> str:
    """Return which changes of one option would each fit, the cheapest first, with the figures of each."""

    def outcome(setting: str, value: Any) -> str | None:
        changed = replace(_changed(request, setting, value), gradient_checkpointing=True)
        try:
            planner = CachedPlanner(resolve_request(changed))
            found = find_choice(planner, _strategies(changed, planner.settings.run))
        except ShardmakeError:  # this accelerator or model cannot do it
            return None
        if found is None:
            return None
        return f"{found.choice.strategy} with checkpointing, {memory_and_time(found)}"

    length = request.sequence_length or DEFAULT_LENGTH
    kinds = [*_levers(request), *changes(request.nodes, length, request.method, request.optimizer)]
    found = suggestions(kinds, outcome)
    lines = [f"{_options(request, setting, value)}: {text}" for setting, value, text in found]
    return "; or ".join(lines) or "No single change helps: use GPUs with more memory, or change several settings"


def _changed(request: EstimateRequest, setting: str, value: Any) -> EstimateRequest:
    """Return ``request`` with one other value, and more micro batches if a step would see fewer tokens."""
    more = 1
    if setting in _SHARES:
        more = request.micro_batch // value if setting == "micro_batch" else value
    return replace(request, **{setting: value}, accumulation=request.accumulation * more)


def _options(request: EstimateRequest, setting: str, value: Any) -> str:
    """Return the options of the command line that make the change; a flag has no value."""
    if setting == "strategies":
        return f"--strategy {' '.join(value)}"
    name = f"--{setting.replace('_', '-')}"
    accumulation = _changed(request, setting, value).accumulation
    more = f" --accumulation {accumulation}" if accumulation != request.accumulation else ""
    return name if value is True else f"{name} {value}{more}"


def _levers(request: EstimateRequest) -> Iterator[Kind]:
    """Yield the options with which the training has the same steps, up to rounding.

    Of strategies these are the ones that ``request`` leaves out, the fastest first: every other change keeps those that
    it names.
    """
    if request.loss == "plain":
        yield "loss", ["fused", "chunked"]
    has_model = OBJECTIVES[request.objective].has_reference and not METHODS[request.method].has_adapters
    if has_model and request.reference != "precomputed":
        yield "reference", ["precomputed"]
    for setting in ("sequence_parallel", "tensor_parallel"):
        if getattr(request, setting) == 1:
            yield setting, shared_by(request.gpus_per_node)
    if not request.activation_offload:
        yield "activation_offload", [True]
    if request.micro_batch > 1:
        yield "micro_batch", [size for size in range(request.micro_batch - 1, 0, -1) if request.micro_batch % size == 0]
    if request.strategies:
        others = sorted(set(STRATEGIES) - set(request.strategies), key=lambda name: STRATEGY_SPECS[name].fallback_order)
        yield "strategies", [(name,) for name in others]


_SHARES = ("sequence_parallel", "tensor_parallel", "micro_batch")
"""Settings with which a forward pass of all ranks sees fewer tokens."""
