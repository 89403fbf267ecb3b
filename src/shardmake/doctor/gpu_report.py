"""Results of trainings on GPUs: a JSON file for ``benchmarks/results/gpu``, and its rows in docs/gpu.md."""

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import ClassVar

from pydantic import Field

from shardmake.core.units import GIB
from shardmake.run.findings import Finding
from shardmake.run.record import RunRecord, optional

COLUMNS = (
    "date", "GPUs", "driver", "torch", "DeepSpeed", "strategies", "loss differs by", "attention", "memory error",
    "modelled / measured step", "all-reduce", "failed",
)  # fmt: skip
TRAINING_COLUMNS = (
    "GPU", "training", "strategy or program", "tensors, GiB", "allocator, GiB", "process, GiB", "step, s", "tokens/s",
)  # fmt: skip
"""Measured, and the error of the plan; a bare training has no plan."""
_NONE = "-"
_SIZES = ("allocated", "reserved", "device")


class Measured(RunRecord):
    """A training, measured."""

    training: str = optional("", "Model and batch; the losses of equal ones can be compared.")
    losses: dict[int, float] = Field(description="Training loss by step.")
    allocated: int | None = Field(description="Peak bytes of tensors on rank 0's GPU; None on a CPU.")
    reserved: int | None = Field(description="Peak bytes of the allocator there.")
    device: int | None = optional(None, "Peak bytes of the process in nvidia-smi.")
    step_seconds: float = Field(description="Median seconds per step after the warm-up.")
    tokens_per_second: float | None = optional(None, "Tokens of all ranks in that time.")


class Bare(Measured):
    """A training without Shardmake, in the same minutes."""

    trainer: str = Field(description="The program that trained.")


class Trained(Measured):
    """One strategy: losses, memory and step time, measured and planned."""

    strategy: str = Field(description="Name of the strategy.")
    settings: str = optional("", "Settings that change memory and steps, and not the losses.")
    precision: str = Field(description="Compute data type.")
    weights: str = optional("", "Data type of the weights that the optimizer updates or that are frozen.")
    planned_allocated: int = Field(description="The plan's figure for the tensors.")
    planned_reserved: int = Field(description="The plan's figure for the allocator.")
    planned_device: int | None = optional(None, "The plan's figure for the process.")
    planned_step_seconds: float = Field(description="The plan's figure.")

    def loss_difference(self, other: "Trained") -> float:
        """Return the largest difference of the losses over the steps that both have; infinite without any."""
        steps = self.losses.keys() & other.losses.keys()
        return max((abs(self.losses[step] - other.losses[step]) for step in steps), default=float("inf"))

    @property
    def memory_error(self) -> float | None:
        """Return the relative error of the planned bytes of tensors; negative if the plan has too few."""
        return None if self.allocated is None else self.planned_allocated / self.allocated - 1


class AttentionErrors(RunRecord):
    """Relative errors of loss and gradients in 16 bits against eager attention in fp32."""

    varlen: float = Field(description="With variable-length attention.")
    eager: float = Field(description="With eager attention.")


class GpuReport(RunRecord):
    """The JSON file."""

    made_by: ClassVar[str] = "make gpu-check, or shardmake doctor --node --train"
    time: float = Field(description="Unix time at the start.")
    seconds: float = Field(0.0, description="Duration.")
    commit: str | None = Field(None, description="Commit of Shardmake; ends in `-dirty` if files were changed.")
    gpu: str = Field(description="Name of the GPU in the driver.")
    accelerator: str = Field(description="Its name in the catalogue.")
    memory_gib: float = Field(description="Memory of one GPU.")
    ranks: int = Field(description="GPUs that were used.")
    driver: int | None = Field(description="Branch of the driver.")
    cuda: str | None = Field(description="CUDA version of torch.")
    nccl: str | None = Field(description="Version of NCCL.")
    versions: dict[str, str] = Field(description="Versions of the libraries.")
    outcomes: dict[str, str] = Field(default_factory=dict, description="`passed`, `failed` or `skipped`, by check.")
    trained: list[Trained] = Field(default_factory=list, description="One entry per training; ddp first.")
    attention: AttentionErrors | None = Field(None, description="None if it was not compared.")
    node: list[Finding] = Field(default_factory=list, description="Findings of doctor about GPUs and kernels.")
    all_reduce_gbps: float | None = Field(None, description="Bus bandwidth within the node; None with one GPU.")
    changes: str = optional("", "What was changed in Shardmake for these versions.")
    bare: list[Bare] = optional([], "Trainings without Shardmake.")
    rates: dict[str, float] = optional({}, "Other rates, the unit at the end of the name.")

    @property
    def name(self) -> str:
        """Return the name of the JSON file: GPU, number and time."""
        gpu = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        return f"{gpu}-x{self.ranks}-{datetime.fromtimestamp(self.time, UTC):%Y%m%d-%H%M%S}.json"

    def row(self) -> str:
        """Return the report as a row of the table in docs/gpu.md."""
        errors = [one.memory_error for one in self.trained if one.memory_error is not None]
        ratios = [one.planned_step_seconds / one.step_seconds for one in self.trained]
        cells = (
            f"{datetime.fromtimestamp(self.time, UTC):%Y-%m-%d}",
            f"{self.ranks} x {self.gpu}",
            self.driver and f"{self.driver}, CUDA {self.cuda}",
            self.versions.get("torch"),
            self.versions.get("deepspeed"),
            ", ".join(dict.fromkeys(one.strategy for one in self.trained)),
            self._loss_cell(),
            self.attention and f"{self.attention.varlen:.2%} (eager {self.attention.eager:.2%})",
            errors and f"{median(map(abs, errors)):.1%}, worst {max(errors, key=abs):+.1%}",
            ratios and f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            self.all_reduce_gbps and f"{self.all_reduce_gbps:.1f} GB/s",
            ", ".join(name for name, outcome in self.outcomes.items() if outcome == "failed") or "none",
        )
        return as_row([str(cell or _NONE) for cell in cells])

    def training_rows(self) -> Iterator[str]:
        """Yield the trainings as rows of the second table in docs/gpu.md: those alone on the GPU, and bare ones."""
        for one in self.trained:
            if one.training:
                sizes = [_planned(getattr(one, f"planned_{size}"), getattr(one, size)) for size in _SIZES]
                settings = ", ".join(filter(None, (one.strategy, one.settings)))
                seconds = f"{one.planned_step_seconds:.3f} / {one.step_seconds:.3f}"
                yield as_row([self.gpu, one.training, settings, *sizes, seconds, _tokens(one)])
        for bare in self.bare:
            sizes = [f"{size / GIB:.2f}" if size else _NONE for size in (getattr(bare, name) for name in _SIZES)]
            yield as_row([self.gpu, bare.training, bare.trainer, *sizes, f"{bare.step_seconds:.3f}", _tokens(bare)])

    def _loss_cell(self) -> str:
        """Return the largest difference to the first training of the same kind, over the steps that both have."""
        first: dict[str, Trained] = {}
        for one in self.trained:
            first.setdefault(one.training, one)
        others = [one for one in self.trained if one is not first[one.training]]
        return f"{max(one.loss_difference(first[one.training]) for one in others):.4f}" if others else ""


def _planned(planned: int | None, measured: int | None) -> str:
    if not planned or not measured:
        return _NONE
    return f"{measured / GIB:.2f} ({planned / measured - 1:+.1%})"


def _tokens(one: Measured) -> str:
    return f"{one.tokens_per_second:,.0f}" if one.tokens_per_second else _NONE


def as_row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
