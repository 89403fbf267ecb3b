"""``shardmake estimate``: the memory of every strategy for a model on some hardware, as a table, in JSON, explained."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from shardmake.config.models import STRATEGIES, Attention, Method, Optimizer, Precision, Strategy
from shardmake.core.atomic import write_json
from shardmake.core.errors import ShardmakeError, nearest
from shardmake.core.units import GB, GIB
from shardmake.memory import calibration, closed_form
from shardmake.memory.buckets import Buckets
from shardmake.memory.estimate import Estimate, estimate_closed_form, estimate_simulated, events_of, from_json, verdict
from shardmake.memory.events import StepEvents
from shardmake.memory.hardware import ACCELERATORS, Accelerator, Hardware, find_accelerator
from shardmake.memory.model import Model, Split, cached_path, read_model, split
from shardmake.memory.probe import probe
from shardmake.memory.scenario import LibraryBehavior, Scenario
from shardmake.memory.trace import trace_all
from shardmake.plan import step_time
from shardmake.plan.suggestions import changes, suggestions

LARGEST_GPU = 1024  # GiB; more than that is MiB written by mistake
LARGEST_HOST = 64 * 1024  # GiB
Scripts = dict[tuple[bool, bool], StepEvents]
LossKind = Literal["plain", "fused", "chunked"]

EXPLANATIONS = {
    "weights": "trained weights: 2 bytes in DeepSpeed (its fp32 masters stand apart), 4 in DDP and FSDP; "
    "divided by the ranks under ZeRO-3 and FSDP",
    "frozen weights": "weights of the base model under adapters: 2 bytes an element, 0.516 in NF4 with double "
    "quantization (QLoRA, Dettmers et al. 2023)",
    "gradients": "one per trained weight: 2 bytes in DeepSpeed, 4 in FSDP; divided by the ranks from ZeRO-2 on",
    "master weights": "DeepSpeed's fp32 copy of the trained weights (Rajbhandari et al. 2020, section 3.1)",
    "optimizer states": "AdamW: two moments, fp32 in DeepSpeed, else in the weights' type; made in the first step",
    "optimizer temporaries": "what torch's foreach optimizer makes beside the weights in a step",
    "communication buffers": "DDP's reducer buckets (a copy of the gradients), ZeRO's reduce bucket, FSDP's flat "
    "input of the reduce-scatter",
    "gathered weights": "whole weights of layers in use under ZeRO-3 and FSDP: the layer, what is prefetched, and "
    "what is kept because its next use is near (stage3_max_reuse_distance)",
    "weights kept whole": "weights below stage3_param_persistence_threshold",
    "weights on their way": "a whole tensor or unit while it is sharded at the start",
    "activations": "what the forward pass saves for the backward pass, or one input per layer with checkpointing",
    "logits and loss": "logits in fp32, log-softmax, and its gradient: 12 bytes x tokens x vocabulary at the peak",
    "backward temporaries": "gradients of activations, and one recomputed layer with checkpointing",
    "gradients on their way": "a layer's whole gradients until they are reduced",
    "flat gradients": "ZeRO flattens its part of the gradients for the step, ZeRO-3 sub_group_size at a time",
    "fp32 gradients": "ZeRO casts its part of the gradients to fp32 for the step, ZeRO-3 sub_group_size at a time",
    "gradient norm": "a copy in fp64 of the largest gradient, or of its part, for the norm (get_norm_dtype)",
    "model buffers": "buffers of the model, such as the rotary embedding's frequencies",
    "cuBLAS workspaces": "one for the forward and one for the backward thread, 8.1 MiB each",
}


@dataclass(frozen=True)
class EstimateRequest:
    """The command line of ``shardmake estimate``; sizes in GiB as people write them."""

    model: str
    nodes: int = 1
    gpus_per_node: int = 8
    gpu_memory: float = 80.0
    sequence_length: int = 4096
    micro_batch: int = 1
    strategies: Sequence[str] = ()
    gradient_checkpointing: bool | None = None
    attention: Attention = "flash"
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    method: Method = "full"
    lora_rank: int = 16
    lora_targets: str = "all-linear"
    weights: Literal["bf16", "fp32"] | None = None
    loss: LossKind = "plain"
    host_memory: float | None = None
    accelerator: str = "a100-80gb"
    revision: str | None = None
    trust_remote_code: bool = False
    probe: bool = False


@dataclass(frozen=True)
class CandidateRow:
    """One candidate with its memory and verdict."""

    strategy: Strategy
    checkpointing: bool
    memory: Estimate
    fits: bool
    reason: str
    step_seconds: float
    nodes: int

    def as_json(self) -> dict[str, Any]:
        """The candidate as the documented JSON object; bytes."""
        return {
            "strategy": self.strategy,
            "gradient_checkpointing": self.checkpointing,
            "nodes": self.nodes,
            **self.memory.as_json(),
            "fits": self.fits,
            "reason": self.reason,
            "step_seconds": self.step_seconds,
        }


@dataclass(frozen=True)
class EstimateResult:
    """Every candidate, and what would help where none fits."""

    question: EstimateRequest
    model: Model
    split: Split
    rows: tuple[CandidateRow, ...]
    advice: str | None = None
    measured: calibration.Calibration | None = None
    """What a probe has found for these GPUs."""

    def as_json(self) -> dict[str, Any]:
        """Stable JSON: ``candidates`` holds one object per strategy."""
        return {
            "model": self.model.architecture,
            "parameters": self.model.parameters,
            "trainable": self.split.trainable,
            "largest_tensor": self.model.largest_tensor,
            "largest_layer": self.model.largest_block,
            "candidates": [row.as_json() for row in self.rows],
            "advice": self.advice,
            "calibration": self.measured and asdict(self.measured),
        }


def estimate(question: EstimateRequest) -> EstimateResult:
    """Answer ``question``: each strategy with and, where it is left open, without gradient checkpointing."""
    _check(question)
    model = read_model(question.model, revision=question.revision, trust_remote_code=question.trust_remote_code)
    hardware = _hardware(question)
    if question.probe:
        calibration.keep(question.accelerator, probe(model))
    part = split(model, question.method, question.lora_rank, _targets(question.lora_targets))
    rows = tuple(_rows(question, model, part, hardware))
    advice = None if any(row.fits for row in rows) else smallest_change(question, model, hardware)
    return EstimateResult(question, model, part, rows, advice, calibration.read(question.accelerator))


def _rows(question: EstimateRequest, model: Model, part: Split, hardware: Hardware) -> list[CandidateRow]:
    choices = [True, False] if question.gradient_checkpointing is None else [question.gradient_checkpointing]
    scenarios = [
        _scenario(question, model, part, strategy, checkpointing)
        for checkpointing in choices
        for strategy in _strategies(question)
    ]
    if model.decoder is None:
        trace_all(scenarios)
    _act_missing([scenario for scenario in scenarios if not _path(scenario, hardware.gpu_memory).is_file()], hardware)
    return [_row(scenario, hardware) for scenario in scenarios]


def _act_missing(scenarios: Sequence[Scenario], hardware: Hardware) -> None:
    """Act out ``scenarios`` on all cores and keep their estimates; neighbours share a script, so they go together."""
    count = min(len(os.sched_getaffinity(0)), len(scenarios))
    if count < 2:
        return
    share = -(-len(scenarios) // count)
    parts = [(scenarios[start : start + share], hardware.gpu_memory) for start in range(0, len(scenarios), share)]
    with get_context("fork").Pool(len(parts)) as pool:  # this process has no threads and no torch
        pool.starmap(_act_part, parts)


def _act_part(scenarios: Sequence[Scenario], capacity: int) -> None:
    scripts: Scripts = {}
    for scenario in scenarios:
        _remembered(scenario, capacity, scripts)


def _row(scenario: Scenario, hardware: Hardware) -> CandidateRow:
    memory = _remembered(scenario, hardware.gpu_memory, {})
    fits, reason = verdict(memory, scenario, hardware)
    seconds = step_time.step_time(scenario, hardware).total
    return CandidateRow(scenario.strategy, scenario.checkpointing, memory, fits, reason, seconds, scenario.nodes)


def _path(scenario: Scenario, capacity: int) -> Path:
    """Where the estimate of ``scenario`` is kept, by everything it depends on."""
    settings = {name: value for name, value in vars(scenario).items() if name not in ("model", "split")}
    settings["calibration"] = scenario.calibration and asdict(scenario.calibration)
    buckets = vars(buckets_for(scenario.model))
    request = {"model": scenario.model.key, "settings": settings, "buckets": buckets, "capacity": capacity}
    return cached_path("shardmake.plan.estimate", request)


def _remembered(scenario: Scenario, capacity: int, scripts: Scripts) -> Estimate:
    """The estimate of ``scenario``, kept on disk."""
    path = _path(scenario, capacity)
    if path.is_file():
        return from_json(json.loads(path.read_text()))
    key = (scenario.checkpointing, scenario.autocast)
    if key not in scripts:
        scripts[key] = events_of(scenario)
    memory = estimate_simulated(scenario, buckets_for(scenario.model), scripts[key], capacity=capacity)
    write_json(path, memory.as_json())
    return memory


def buckets_for(model: Model) -> Buckets:
    """The sizes that are rendered for ``model``: what Trainer's "auto" makes of its hidden size."""
    h = model.hidden_size
    return Buckets(
        reduce_bucket_size=h * h,
        stage3_prefetch_bucket_size=int(0.9 * h * h),
        stage3_param_persistence_threshold=10 * h,
    )


def _scenario(
    question: EstimateRequest, model: Model, part: Split, strategy: Strategy, checkpointing: bool
) -> Scenario:
    return Scenario(
        model=model,
        split=part,
        strategy=strategy,
        nodes=question.nodes,
        ranks_per_node=question.gpus_per_node,
        micro_batch=question.micro_batch,
        sequence_length=question.sequence_length,
        checkpointing=checkpointing,
        attention=question.attention,
        masked=question.attention == "sdpa",
        precision=question.precision,
        weights=question.weights or "fp32",
        optimizer=question.optimizer,
        method=question.method,
        loss="plain" if question.loss == "plain" else "fused",
        stack=LibraryBehavior(liger_layers=question.loss == "fused"),
        lora_rank=question.lora_rank,
        lora_targets=_hashable(_targets(question.lora_targets)),
        calibration=calibration.read(question.accelerator),
    )


def _targets(text: str) -> str | list[str]:
    return text if text == "all-linear" else [word.strip() for word in text.split(",") if word.strip()]


def _hashable(targets: str | list[str]) -> str | tuple[str, ...]:
    return targets if isinstance(targets, str) else tuple(targets)


def _strategies(question: EstimateRequest) -> list[Strategy]:
    if not question.strategies:
        return [strategy for strategy in STRATEGIES if strategy != "fsdp-hybrid" or question.nodes > 1]
    for name in question.strategies:
        if name not in STRATEGIES:
            raise ShardmakeError(
                f"There is no strategy {name!r}.{nearest(name, STRATEGIES)} Strategies: {', '.join(STRATEGIES)}."
            )
    return [strategy for strategy in STRATEGIES if strategy in question.strategies]


def _check(question: EstimateRequest) -> None:
    for name in ("nodes", "gpus_per_node", "sequence_length", "micro_batch", "lora_rank"):
        if getattr(question, name) < 1:
            raise ShardmakeError(f"--{name.replace('_', '-')} is {getattr(question, name)}; it must be at least 1.")
    if question.gpu_memory > LARGEST_GPU:
        raise ShardmakeError(
            f"--gpu-memory {question.gpu_memory:g} is in GiB, and no GPU has that much. "
            f"If that were MiB, write {question.gpu_memory / 1024:.0f}."
        )
    if question.host_memory is not None and not 0 < question.host_memory <= LARGEST_HOST:
        raise ShardmakeError(
            f"--host-memory is {question.host_memory:g}; give the RAM of one node in GiB, such as 512."
        )
    if question.gpu_memory <= 0:
        raise ShardmakeError(f"--gpu-memory is {question.gpu_memory:g}; give the memory of one GPU in GiB, such as 80.")


def _hardware(question: EstimateRequest) -> Hardware:
    accelerator = find_accelerator(question.accelerator)
    return Hardware(
        accelerator=accelerator,
        gpu_memory=int(question.gpu_memory * GIB),
        host_memory=int(question.host_memory * GIB) if question.host_memory else 1 << 62,
        nvme=1 << 62,
        processes_per_node=question.gpus_per_node,
        cpus_per_node=16 * question.gpus_per_node,
        max_nodes=question.nodes,
        intra_node=accelerator.link * GB,
        inter_node=12.5 * GB,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The smallest change that would fit


def smallest_change(question: EstimateRequest, model: Model, hardware: Hardware) -> str:
    """What would make something fit: nodes, sequence length, adapters, each tried alone with its figure."""

    def outcome(setting: str, value: Any) -> str | None:
        row = _best(EstimateRequest(**{**vars(question), setting: value}), model, hardware)
        return f"{row.strategy} with checkpointing takes {row.memory.gpu.device / GIB:.1f} GiB per GPU" if row else None

    found = suggestions(changes(question.nodes, question.sequence_length, question.method), outcome)
    said = [f"--{setting.replace('_', '-')} {value}: {text}" for setting, value, text in found]
    return "; or ".join(said) or "Nothing helps alone: use GPUs with more memory, or several changes."


def _best(question: EstimateRequest, model: Model, hardware: Hardware) -> CandidateRow | None:
    """The row that needs least, with checkpointing, where it fits; found in closed form, then acted out."""
    part = split(model, question.method, question.lora_rank, _targets(question.lora_targets))
    scenarios = [_scenario(question, model, part, strategy, True) for strategy in SAVERS]
    profiles: dict[tuple[object, ...], closed_form.Profile] = {}
    buckets = buckets_for(model)

    def need(scenario: Scenario) -> int:
        return estimate_closed_form(scenario, buckets, closed_form.profile(scenario, profiles)).gpu.device

    least = min(scenarios, key=need)
    if need(least) > hardware.gpu_memory:
        return None
    row = _row(least, hardware)
    return row if row.fits else None


SAVERS: tuple[Strategy, ...] = ("zero3-offload", "fsdp", "zero3")


# ---------------------------------------------------------------------------------------------------------------------
# For people


def print_table(answer: EstimateResult, explain: bool = False) -> None:
    """The candidates as a table; ``explain`` adds every term with its formula or source."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    question = answer.question
    console.print(
        f"{answer.model.architecture}, {answer.model.parameters / 1e9:.2f} B parameters, "
        f"{answer.split.trainable / 1e9:.2f} B trained; {question.nodes} x {question.gpus_per_node} GPUs of "
        f"{question.gpu_memory:g} GiB, {question.micro_batch} x {question.sequence_length} tokens"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("strategy", "ckpt"):
        table.add_column(name, no_wrap=True)
    for name in ("alloc", "reserved", "device", "host", "NVMe", "disk", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for row in answer.rows:
        table.add_row(*_cells(row), style=None if row.fits else "dim")
    console.print(table)
    console.print(
        "GiB. ckpt: gradient checkpointing. Per GPU: allocated for tensors, reserved by PyTorch, used on the device as "
        "nvidia-smi shows it. Host and NVMe: per node. Disk: checkpoints and the model. step: seconds per step."
    )
    if answer.measured:
        console.print(f"On the device: {answer.measured.words}.")
    if answer.advice:
        console.print(f"Nothing fits. What would: {answer.advice}.")
    if explain:
        _print_terms(console, answer.rows)


def _cells(row: CandidateRow) -> list[str]:
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
        row.strategy,
        "yes" if row.checkpointing else "no",
        *(_gib(size) for size in sizes),
        f"{row.step_seconds:.3g}" if row.step_seconds < 100 else f"{row.step_seconds:.0f}",
        "yes" if row.fits else "no",
    ]


def _gib(size: float) -> str:
    """At most five characters up to a hundred TiB, so that the table fits a terminal of 80 columns."""
    return f"{size / GIB:.1f}" if size < 100 * GIB else f"{size / GIB:.0f}"


def _print_terms(console: Any, rows: Iterable[CandidateRow]) -> None:
    for row in rows:
        checkpointing = "with" if row.checkpointing else "without"
        console.print(
            f"\n{row.strategy} {checkpointing} checkpointing: the peak is in the phase {row.memory.gpu.phase!r}"
        )
        for term, size in sorted(row.memory.gpu.terms.items(), key=lambda item: -item[1]):
            console.print(f"  {size / GIB:9.3f} GiB  {term}: {EXPLANATIONS.get(term, '')}")
        for place, terms in (("host", row.memory.host), ("NVMe", row.memory.nvme), ("disk", row.memory.disk)):
            for term, size in terms.items():
                console.print(f"  {size / GIB:9.3f} GiB  {place}: {term}")


def list_gpus() -> list[Accelerator]:
    """The catalogue."""
    return list(ACCELERATORS.values())
