"""The output of ``shardmake estimate`` as text: the table, the choice, the terms and the numbers that went in."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from shardmake.commands.estimate import EstimateRequest, EstimateResult
from shardmake.config.accelerators import find_accelerator
from shardmake.core.units import GIB, format_count
from shardmake.plan.candidates import Candidate
from shardmake.plan.verdict import Headroom

if TYPE_CHECKING:
    from rich.console import Console

SLOW: Final = 2.0
"""A candidate that takes this many times the seconds of the choice is marked."""

EXPLANATIONS = {
    "weights": "trained weights: 2 bytes in DeepSpeed (without its fp32 master weights), 4 in DDP and FSDP; "
    "divided by the ranks under ZeRO-3 and FSDP",
    "frozen weights": "weights of the base model under adapters: 2 bytes per element. QLoRA: 0.5 in NF4 "
    "(Dettmers et al. 2023), and 4 for the rest without DeepSpeed (prepare_model_for_kbit_training)",
    "quantization scales": "scales of the 4-bit weights, 0.016 bytes per weight with double quantization; whole on "
    "every rank, also under FSDP (Linear4bit.quant_state)",
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


def print_table(result: EstimateResult, explain: bool = False) -> None:
    """Print the candidates; ``explain`` adds the numbers that went in, and every term with its formula or source."""
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
    for name in ("alloc", "cache", "device", "host", "NVMe", "disk", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for row in result.rows:
        table.add_row(*_cells(row, result.choice), style=_style(row, result.choice))
    console.print(table)
    console.print(
        "GiB. ckpt: gradient checkpointing. Per GPU: allocated for tensors, reserved by PyTorch's cache, used on the "
        "device as nvidia-smi shows it. Host and NVMe: per node. Disk: checkpoints and the model. step: seconds per "
        f"step. fits: tight if the margin is less than the estimate's error, slow from {SLOW:g} times the step of the "
        "choice (*) on."
    )
    if result.reason:
        console.print(f"* {result.reason}", highlight=False)
    if result.measured:
        console.print(f"On the device: {result.measured.origin}.")
    if result.advice:
        console.print(f"Nothing fits. What would: {result.advice}.")
    if explain:
        _print_inputs(console, result.inputs)
        _print_terms(console, result.rows)


def _devices(request: EstimateRequest) -> str:
    accelerator = find_accelerator(request.accelerator)
    return "CPU ranks" if accelerator.is_cpu else f"GPUs of {request.gpu_memory or accelerator.memory:g} GiB"


def _style(row: Candidate, choice: Candidate | None) -> str | None:
    return "bold" if row is choice else None if row.fits else "dim"


def mark(row: Candidate, choice: Candidate | None) -> str:
    """Return the table's word for how ``row`` fits beside the choice."""
    if not row.fits:
        return "no"
    word = "yes" if row.headroom == Headroom.ENOUGH else "tight"
    if choice is not None and row.step_seconds >= SLOW * choice.step_seconds:
        word = "slow"
    return f"{word}*" if row is choice else word


def _cells(row: Candidate, choice: Candidate | None) -> list[str]:
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
        mark(row, choice),
    ]


def _gib(size: float) -> str:
    """At most five characters up to a hundred TiB, so that the table fits a terminal of 80 columns."""
    return f"{size / GIB:.1f}" if size < 100 * GIB else f"{size / GIB:.0f}"


def _print_inputs(console: "Console", inputs: Iterable[tuple[str, str]]) -> None:
    console.print("\nThe numbers that went in:")
    for name, value in inputs:
        console.print(f"  {name}: {value}", highlight=False)


def _print_terms(console: "Console", rows: Iterable[Candidate]) -> None:
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
