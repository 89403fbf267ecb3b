"""The results of one run of the checks: a JSON file below ``benchmarks/results/gpu`` and a row of docs/gpu.md."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import ClassVar

from pydantic import Field

from shardmake.run.findings import Finding
from shardmake.run.record import RunRecord
from tests.workflow.checkout import REPOSITORY

RESULTS = REPOSITORY / "benchmarks/results/gpu"
COLUMNS = (
    "date", "GPUs", "driver", "torch", "DeepSpeed", "strategies", "loss differs by", "attention", "memory error",
    "modelled / measured step", "all-reduce", "failed",
)  # fmt: skip
_NONE = "-"


class Trained(RunRecord):
    """One strategy: losses, memory and step time, measured and planned."""

    strategy: str = Field(description="Name of the strategy.")
    precision: str = Field(description="Compute data type.")
    losses: dict[int, float] = Field(description="Training loss by step.")
    allocated: int | None = Field(description="Peak bytes of tensors on rank 0's GPU; None on a CPU.")
    reserved: int | None = Field(description="Peak bytes of the allocator there.")
    planned_allocated: int = Field(description="The plan's figure for the first.")
    planned_reserved: int = Field(description="The plan's figure for the second.")
    step_seconds: float = Field(description="Median seconds per step after the warm-up.")
    planned_step_seconds: float = Field(description="The plan's figure.")

    def loss_difference(self, other: "Trained") -> float:
        """Return the largest difference of the losses of a step; infinite if the steps differ."""
        if self.losses.keys() != other.losses.keys():
            return float("inf")
        return max(abs(loss - other.losses[step]) for step, loss in self.losses.items())

    @property
    def memory_error(self) -> float | None:
        """Return the relative error of the planned bytes of tensors; negative if the plan has too few."""
        return None if self.allocated is None else self.planned_allocated / self.allocated - 1

    @property
    def step_ratio(self) -> float:
        """Return modelled over measured step time."""
        return self.planned_step_seconds / self.step_seconds


class AttentionErrors(RunRecord):
    """Relative errors of loss and gradients in 16 bits against eager attention in fp32."""

    varlen: float = Field(description="With variable-length attention.")
    eager: float = Field(description="With eager attention.")


class GpuReport(RunRecord):
    """The JSON file."""

    made_by: ClassVar[str] = "make gpu-check"
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
    trained: list[Trained] = Field(default_factory=list, description="One entry per strategy; ddp is the first.")
    attention: AttentionErrors | None = Field(None, description="None if it was not compared.")
    node: list[Finding] = Field(default_factory=list, description="Findings of doctor about GPUs and kernels.")
    all_reduce_gbps: float | None = Field(None, description="Bus bandwidth within the node; None with one GPU.")

    @property
    def name(self) -> str:
        """Return the name of the JSON file: GPU, number and time."""
        return f"{_slug(self.gpu)}-x{self.ranks}-{datetime.fromtimestamp(self.time, UTC):%Y%m%d-%H%M%S}.json"

    def row(self) -> str:
        """Return the report as a row of the table in docs/gpu.md."""
        cells = (
            f"{datetime.fromtimestamp(self.time, UTC):%Y-%m-%d}",
            f"{self.ranks} x {self.gpu}",
            self.driver and f"{self.driver}, CUDA {self.cuda}",
            self.versions.get("torch"),
            self.versions.get("deepspeed"),
            ", ".join(one.strategy for one in self.trained),
            self._loss_cell(),
            self.attention and f"{self.attention.varlen:.2%} (eager {self.attention.eager:.2%})",
            _error_cell([one.memory_error for one in self.trained if one.memory_error is not None]),
            _ratio_cell([one.step_ratio for one in self.trained]),
            self.all_reduce_gbps and f"{self.all_reduce_gbps:.1f} GB/s",
            ", ".join(name for name, outcome in self.outcomes.items() if outcome == "failed") or "none",
        )
        return as_row([str(cell or _NONE) for cell in cells])

    def _loss_cell(self) -> str:
        differences = [one.loss_difference(self.trained[0]) for one in self.trained[1:]]
        return f"{max(differences):.4f}" if differences else ""


def _error_cell(errors: Sequence[float]) -> str:
    """Return median and worst absolute error."""
    if not errors:
        return ""
    return f"{median(map(abs, errors)):.1%}, worst {max(errors, key=abs):+.1%}"


def _ratio_cell(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


def as_row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def write(report: GpuReport, folder: Path = RESULTS) -> Path:
    """Write the JSON file and return its path."""
    path = folder / report.name
    report.write(path)
    return path


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
