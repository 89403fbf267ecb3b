"""The output of ``shardmake estimate`` as text: the table, the choice, the terms and the numbers that went in."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from shardmake.commands.estimate import EstimateRequest, EstimateResult
from shardmake.commands.estimate_terms import DISK_TERMS, GPU_TERMS, HOST_TERMS, NVME_TERMS
from shardmake.config.accelerators import find_accelerator
from shardmake.core.units import GIB, format_count, format_number
from shardmake.plan.candidates import Candidate
from shardmake.plan.reasons import describe_scaling
from shardmake.plan.verdict import Headroom

if TYPE_CHECKING:
    from rich.console import Console

SLOW: Final = 2.0
"""A candidate that takes this many times the seconds of the choice is marked."""


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
    if result.traced_tokens:
        console.print(describe_scaling(result.traced_tokens, request.sequence_length or 0))
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
        format_number(row.step_seconds),
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
            console.print(f"  {size / GIB:9.3f} GiB  {term}: {GPU_TERMS[term]}")
        for place, terms, meaning in (
            ("host", row.memory.host, HOST_TERMS),
            ("NVMe", row.memory.nvme, NVME_TERMS),
            ("disk", row.memory.disk, DISK_TERMS),
        ):
            for term, size in terms.items():
                console.print(f"  {size / GIB:9.3f} GiB  {place}: {term}: {meaning[term]}")
