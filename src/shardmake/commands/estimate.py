"""``shardmake estimate``: the memory of every strategy for a model on some hardware, as a table or JSON."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from shardmake.config.accelerators import find_accelerator
from shardmake.config.attention import Attention
from shardmake.config.load import parse_section
from shardmake.config.models import (
    STRATEGIES,
    Cluster,
    Lora,
    Method,
    Optimizer,
    Precision,
    Run,
    Section,
    Strategy,
)
from shardmake.config.user_files import read_user_files
from shardmake.core.errors import ConfigError, ShardmakeError, nearest
from shardmake.core.units import GIB, format_count
from shardmake.memory import calibration
from shardmake.memory.calibration import Calibration
from shardmake.memory.model import Model, Split
from shardmake.memory.probe import probe
from shardmake.memory.read_config import read_model
from shardmake.memory.scenario import LibraryBehavior
from shardmake.plan.candidates import Candidate, choices
from shardmake.plan.choose import choose_from
from shardmake.plan.planner import CachedPlanner
from shardmake.plan.reasons import figures, seconds
from shardmake.plan.resolve import ResolvedRun, check_strategy, kernels_of, resolve
from shardmake.plan.suggestions import Kind, changes, suggestions
from shardmake.run.own_files import check_refused

LARGEST_GPU = 1024  # GiB; more than that is MiB written by mistake
LARGEST_HOST = 64 * 1024  # GiB
NO_LIMIT = 2.0**32  # GiB of host RAM where the command line gives none
CORES_PER_GPU = 16
DEFAULT_LENGTH = 4096
LossKind = Literal["plain", "fused", "chunked"]

EXPLANATIONS = {
    "weights": "trained weights: 2 bytes in DeepSpeed (without its fp32 master weights), 4 in DDP and FSDP; "
    "divided by the ranks under ZeRO-3 and FSDP",
    "frozen weights": "weights of the base model under adapters: 2 bytes per element, 0.516 in NF4 with double "
    "quantization (QLoRA, Dettmers et al. 2023)",
    "gradients": "one per trained weight: 2 bytes in DeepSpeed, 4 in FSDP; divided by the ranks from ZeRO-2 on",
    "master weights": "DeepSpeed's fp32 copy of the trained weights (Rajbhandari et al. 2020, section 3.1)",
    "optimizer states": "AdamW: two moments, fp32 in DeepSpeed, else in the weights' type; created in the first step",
    "optimizer temporaries": "temporary tensors of torch's foreach optimizer in a step",
    "communication buffers": "DDP's reducer buckets (a copy of the gradients), ZeRO's reduce bucket, FSDP's flat "
    "input of the reduce-scatter",
    "gathered weights": "full weights of layers in use under ZeRO-3 and FSDP: the layer, prefetched weights, and "
    "weights that are kept because their next use is near (stage3_max_reuse_distance)",
    "persistent weights": "weights below stage3_param_persistence_threshold, which ZeRO-3 does not shard",
    "weights during loading": "a full tensor or unit before it is sharded at the start",
    "activations": "tensors saved by the forward pass for the backward pass, or one input per layer with checkpointing",
    "logits and loss": "logits in fp32, log-softmax, and its gradient: 12 bytes x tokens x vocabulary at the peak",
    "backward temporaries": "gradients of activations, and one recomputed layer with checkpointing",
    "gradients before reduction": "the full gradients of a layer until they are reduced",
    "flat gradients": "ZeRO flattens its part of the gradients for the step, ZeRO-3 sub_group_size at a time",
    "fp32 gradients": "ZeRO casts its part of the gradients to fp32 for the step, ZeRO-3 sub_group_size at a time",
    "gradient norm": "a copy in fp64 of the largest gradient, or of its part, for the norm (get_norm_dtype)",
    "model buffers": "buffers of the model, such as the rotary embedding's frequencies",
    "cuBLAS workspaces": "one for the forward and one for the backward thread, 8.1 MiB each",
}


@dataclass(frozen=True)
class EstimateRequest:
    """The options of ``shardmake estimate``; sizes in GiB."""

    model: str
    nodes: int = 1
    gpus_per_node: int = 8
    gpu_memory: float | None = None
    """None: that of the accelerator."""
    sequence_length: int | None = None
    """None: 4096, or the model's positions if it has fewer."""
    micro_batch: int = 1
    strategies: Sequence[str] = ()
    gradient_checkpointing: bool | None = None
    attention: Attention | None = None
    """None: the fastest that the model's class and the GPU support."""
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    method: Method = "full"
    lora_rank: int = 16
    lora_targets: str = "all-linear"
    weights: Literal["bf16", "fp32"] | None = None
    loss: LossKind = "plain"
    fsdp_version: Literal[1, 2] = 2
    host_memory: float | None = None
    accelerator: str = "a100-80gb"
    revision: str | None = None
    trust_remote_code: bool = False
    probe: bool = False
    deepspeed_config: str | None = None


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

    def as_json(self) -> dict[str, Any]:
        """Return the documented JSON object; ``candidates`` holds one object per strategy."""
        return {
            "model": self.model.architecture,
            "parameters": self.model.parameters,
            "trainable": self.split.trainable,
            "largest_tensor": self.model.largest_tensor,
            "largest_layer": self.model.largest_block,
            "candidates": [_row_json(row) for row in self.rows],
            "advice": self.advice,
            "calibration": self.measured and asdict(self.measured),
        }


def _row_json(row: Candidate) -> dict[str, Any]:
    """Return one candidate; sizes in bytes."""
    return {
        "strategy": row.choice.strategy,
        "gradient_checkpointing": row.choice.gradient_checkpointing,
        "nodes": row.choice.nodes,
        **row.memory.as_json(),
        "fits": row.fits,
        "reason": row.reason,
        "step_seconds": row.step_seconds,
    }


def estimate(request: EstimateRequest) -> EstimateResult:
    """Estimate each strategy, with and without gradient checkpointing if ``request`` leaves that open.

    Raises:
        ConfigError: An option cannot be used.
        ModelError: The model's config.json cannot be used.
    """
    _check(request)
    settings = resolve_request(request)
    request = replace(request, sequence_length=settings.run.sequence_length)
    if request.probe:
        calibration.keep(settings.hardware.accelerator.name, probe(settings.model))
    possible = sorted(
        choices(settings, _strategies(request, settings.run)), key=lambda choice: not choice.gradient_checkpointing
    )
    rows = CachedPlanner(settings).simulate_all(possible)
    advice = None if any(row.fits for row in rows) else smallest_change(request)
    measured = calibration.read(settings.hardware.accelerator.name)
    return EstimateResult(request, settings.model, settings.split, tuple(rows), advice, measured)


def resolve_request(request: EstimateRequest) -> ResolvedRun:
    """Return the run and the cluster that ``request`` describes, as the planner takes them."""
    behavior = LibraryBehavior(liger_layers=request.loss == "fused")
    run = _run(request)
    check_refused(read_user_files(run), run)
    settings = resolve(run, _cluster(request))
    fastest = settings.abilities.best_attention(kernels_of(settings.hardware, settings.precision), packing=False)
    attention = request.attention or fastest
    return replace(settings, attention=attention, weights=request.weights or "fp32", behavior=behavior)


def _run(request: EstimateRequest) -> Run:
    checkpointing = request.gradient_checkpointing
    targets = request.lora_targets
    return parse_section(
        Run,
        {
            "model": request.model,
            "revision": request.revision,
            "trust_remote_code": request.trust_remote_code,
            "data": {"train": "train.jsonl"},
            "sequence_length": request.sequence_length or _default_length(request),
            "global_batch_size": request.nodes * request.gpus_per_node * request.micro_batch,
            "micro_batch_size": request.micro_batch,
            "max_steps": 1,
            "learning_rate": 1e-4,
            "optimizer": request.optimizer,
            "precision": request.precision,
            "attention": request.attention or "auto",
            "gradient_checkpointing": "auto" if checkpointing is None else checkpointing,
            "loss": "plain" if request.loss == "plain" else "fused",
            "method": request.method,
            "lora": {"rank": request.lora_rank, "targets": targets if targets == "all-linear" else _words(targets)},
            "nodes": request.nodes,
            "fsdp_version": request.fsdp_version,
            "deepspeed_config": request.deepspeed_config,
        },
        "The options",
    )


def _cluster(request: EstimateRequest) -> Cluster:
    cluster = parse_section(
        Cluster,
        {
            "executor": "local",
            "accelerator": request.accelerator,
            "gpu_memory_gib": request.gpu_memory,
            "max_nodes": request.nodes,
            "processes_per_node": request.gpus_per_node,
            "cpus_per_node": CORES_PER_GPU * request.gpus_per_node,
            "memory_gib_per_node": request.host_memory or LARGEST_HOST,
            "nvme_path": "/nvme",
        },
        "The options",
    )
    if request.host_memory is None:
        cluster = cluster.model_copy(update={"memory_gib_per_node": NO_LIMIT})
    return cluster


def _default_length(request: EstimateRequest) -> int:
    model = read_model(request.model, revision=request.revision, trust_remote_code=request.trust_remote_code)
    return min(DEFAULT_LENGTH, model.max_positions or DEFAULT_LENGTH)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _strategies(request: EstimateRequest, run: Run) -> list[Strategy]:
    """Return the strategies that the user named, in the order of the table; none for all that the planner considers."""
    for name in request.strategies:
        if name not in STRATEGIES:
            raise ConfigError(
                f"There is no strategy {name!r}.{nearest(name, STRATEGIES)} Strategies: {', '.join(STRATEGIES)}."
            )
    named = [strategy for strategy in STRATEGIES if strategy in request.strategies]
    for strategy in named:
        check_strategy(run, strategy)
    return named


_COUNTS: dict[str, tuple[type[Section], str]] = {
    "nodes": (Cluster, "max_nodes"),
    "gpus_per_node": (Cluster, "processes_per_node"),
    "sequence_length": (Run, "sequence_length"),
    "micro_batch": (Run, "global_batch_size"),
    "lora_rank": (Lora, "rank"),
}
"""The key of the configuration that limits each option."""


def _largest(section: type[Section], field: str) -> int:
    return next(limit.le for limit in section.model_fields[field].metadata if hasattr(limit, "le"))


def _check(request: EstimateRequest) -> None:
    if not request.model:
        raise ConfigError("No model is named. Name a hub id, a model folder or a config.json.")
    for name, (section, field) in _COUNTS.items():
        value, largest = getattr(request, name), _largest(section, field)
        if value is not None and not 1 <= value <= largest:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}. Write a number from 1 to {largest:,}.")
    try:
        find_accelerator(request.accelerator)
    except ConfigError as error:
        raise ConfigError(f"--accelerator: {error}") from None
    if request.gpu_memory is not None and request.gpu_memory > LARGEST_GPU:
        raise ConfigError(
            f"--gpu-memory {request.gpu_memory:g} is in GiB, and no GPU has that much. "
            f"If that were MiB, write {request.gpu_memory / 1024:.0f}."
        )
    if request.host_memory is not None and not 0 < request.host_memory <= LARGEST_HOST:
        raise ConfigError(f"--host-memory is {request.host_memory:g}; give the RAM of one node in GiB, such as 512.")
    if request.gpu_memory is not None and request.gpu_memory < 1:
        raise ConfigError(f"--gpu-memory is {request.gpu_memory:g}; give the memory of one GPU in GiB, such as 80.")


# ---------------------------------------------------------------------------------------------------------------------
# The smallest change that would fit


def smallest_change(request: EstimateRequest) -> str:
    """Return which changes of one option would each fit, the cheapest first, with the figures of each."""

    def outcome(setting: str, value: Any) -> str | None:
        changed = replace(request, strategies=(), gradient_checkpointing=True, **{setting: value})
        try:
            found, _ = choose_from(CachedPlanner(resolve_request(changed)))
        except ShardmakeError:  # nothing fits, or this accelerator cannot do it
            return None
        return f"{found.choice.strategy} with checkpointing, {figures(found)}, {seconds(found)} per step"

    length = request.sequence_length or DEFAULT_LENGTH
    kinds = [*_levers(request), *changes(request.nodes, length, request.method, request.optimizer)]
    found = suggestions(kinds, outcome)
    lines = [f"--{setting.replace('_', '-')} {value}: {text}" for setting, value, text in found]
    return "; or ".join(lines) or "No single change helps: use GPUs with more memory, or change several settings"


def _levers(request: EstimateRequest) -> Iterator[Kind]:
    """Yield the options that cost nothing: the training has the same steps, up to rounding."""
    if request.loss == "plain":
        yield "loss", ["fused", "chunked"]
    if request.micro_batch > 1:
        yield "micro_batch", [request.micro_batch >> power for power in range(1, request.micro_batch.bit_length())]


# ---------------------------------------------------------------------------------------------------------------------
# Output as text


def print_table(result: EstimateResult, explain: bool = False) -> None:
    """The candidates as a table; ``explain`` adds every term with its formula or source."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    request = result.request
    ranks = f"{request.nodes} x {request.gpus_per_node} {_devices(request)}"
    console.print(
        f"{result.model.architecture}, {format_count(result.model.parameters)} parameters, "
        f"{format_count(result.split.trainable)} trained; {ranks}, "
        f"{request.micro_batch} x {request.sequence_length} tokens"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("strategy", "ckpt"):
        table.add_column(name, no_wrap=True)
    for name in ("alloc", "reserved", "device", "host", "NVMe", "disk", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for row in result.rows:
        table.add_row(*_cells(row), style=None if row.fits else "dim")
    console.print(table)
    console.print(
        "GiB. ckpt: gradient checkpointing. Per GPU: allocated for tensors, reserved by PyTorch, used on the device as "
        "nvidia-smi shows it. Host and NVMe: per node. Disk: checkpoints and the model. step: seconds per step."
    )
    if result.measured:
        console.print(f"On the device: {result.measured.origin}.")
    if result.advice:
        console.print(f"Nothing fits. What would: {result.advice}.")
    if explain:
        _print_terms(console, result.rows)


def _devices(request: EstimateRequest) -> str:
    accelerator = find_accelerator(request.accelerator)
    return "CPU ranks" if accelerator.is_cpu else f"GPUs of {request.gpu_memory or accelerator.memory:g} GiB"


def _cells(row: Candidate) -> list[str]:
    memory = row.memory
    sizes = (
        memory.gpu.allocated,
        memory.gpu.reserved,
        memory.gpu.device,
        memory.host_total,
        sum(memory.nvme.values()),
        sum(memory.disk.values()),
    )
    return [
        row.choice.strategy,
        "yes" if row.choice.gradient_checkpointing else "no",
        *(_gib(size) for size in sizes),
        f"{row.step_seconds:.3g}" if row.step_seconds < 100 else f"{row.step_seconds:.0f}",
        "yes" if row.fits else "no",
    ]


def _gib(size: float) -> str:
    """At most five characters up to a hundred TiB, so that the table fits a terminal of 80 columns."""
    return f"{size / GIB:.1f}" if size < 100 * GIB else f"{size / GIB:.0f}"


def _print_terms(console: Any, rows: Iterable[Candidate]) -> None:
    for row in rows:
        checkpointing = "with" if row.choice.gradient_checkpointing else "without"
        console.print(
            f"\n{row.choice.strategy} {checkpointing} checkpointing: the peak is in the phase {row.memory.gpu.phase!r}"
        )
        for term, size in sorted(row.memory.gpu.terms.items(), key=lambda item: -item[1]):
            console.print(f"  {size / GIB:9.3f} GiB  {term}: {EXPLANATIONS.get(term, '')}")
        for place, terms in (("host", row.memory.host), ("NVMe", row.memory.nvme), ("disk", row.memory.disk)):
            for term, size in terms.items():
                console.print(f"  {size / GIB:9.3f} GiB  {place}: {term}")
