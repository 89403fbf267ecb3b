"""Compare `shardmake estimate`, and the formulas that people use today, with published measurements, row by row.

    python -m benchmarks.memory_accuracy [--csv FILE]
    python -m benchmarks.memory_accuracy --csv benchmarks/data/memory_held_out.csv

The second file was collected when the model was finished, and scored before anything was changed for it.
Each row goes through the planner of the command, with the command's defaults where its source says nothing else.
"""

import argparse
import csv
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.formulas import accelerate_training, cookbook, deepspeed_states
from benchmarks.old_libraries import estimate
from benchmarks.published_models import CONFIGS, config_file
from benchmarks.published_parts import Part, part_of
from benchmarks.published_runs import Figure, NotModelledError, residual_of, run_of
from shardmake.core.errors import ShardmakeError
from shardmake.core.units import GIB
from shardmake.memory.read_config import read_model
from shardmake.plan.verdict import FAMILY_ERRORS

TRUTH = Path(__file__).parent / "data" / "memory_truth.csv"
Row = dict[str, str]
LOW = -5.0  # percent: an estimate below that is an out-of-memory for whoever trusts it


@dataclass(frozen=True)
class Result:
    """A training run with its estimates in GiB."""

    row: Row
    family: str
    figure: Figure
    estimate: float
    others: dict[str, float]
    allocated: float
    """The estimate of PyTorch's allocated tensors, which some sources measured as well."""

    @property
    def error(self) -> float:
        """Relative error of the estimate, in percent."""
        return 100 * (self.estimate / measured(self.row) - 1)

    @property
    def allocated_error(self) -> float | None:
        """Relative error of the allocated tensors, in percent."""
        measured_allocated = self.row.get("allocated_gib")
        return 100 * (self.allocated / float(measured_allocated) - 1) if measured_allocated else None


@dataclass(frozen=True)
class Omitted:
    """A row without an estimate, and why."""

    row: Row
    why: str


@dataclass(frozen=True)
class PartResult:
    """A row that is not a training run."""

    row: Row
    part: Part


def grade(row: Row) -> str:
    """Return how well the source specifies the row: A, A- or B to E."""
    return re.match(r"[A-E]-?", row["notes"]).group()  # type: ignore[union-attr]


def measured(row: Row) -> float:
    """Return GiB. Qwen's "G" are 10^9: its 81.0 on an 80 GiB card could not be GiB."""
    value = float(row["measured_gib"])
    return value * 1e9 / GIB if "QwenLM" in row["source_url"] else value


def evaluate(row: Row) -> Result | Omitted | PartResult:
    """Return ``row`` with its estimate, or why it has none."""
    if part := part_of(row):
        return PartResult(row, part)
    try:
        run = run_of(row)
        candidate = estimate(run.request, run.libraries)
    except (NotModelledError, ShardmakeError) as error:
        return Omitted(row, str(error).partition("\n")[0])
    gpu = candidate.memory.gpu
    size = gpu.device + run.other_memory if run.figure == "device" else gpu.reserved
    return Result(row, candidate.error.name, run.figure, size / GIB, others(row), gpu.allocated / GIB)


def others(row: Row) -> dict[str, float]:
    """Return the figures of DeepSpeed, Accelerate and the EleutherAI cookbook for a full fine-tune, GiB."""
    if row["model"] not in CONFIGS or "LoRA" in row["strategy"]:
        return {}
    model, ranks = read_model(config_file(row["model"])), int(row["gpus"])
    batch, length = int(row["micro_batch"]), int(row["seq_len"])
    checkpointing = row["grad_ckpt"].startswith("yes")
    if model.decoder is None:
        return {}
    figures = {
        "deepspeed (states)": deepspeed_states(model, ranks),
        "accelerate": accelerate_training(model, "bf16" in row["dtype"]),
        "cookbook": cookbook(model, ranks, length, batch, checkpointing),
    }
    return {name: size / GIB for name, size in figures.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The tables


def _head(row: Row) -> str:
    what = f"{row['model'][:26]:26} {row['strategy'][:34]:34} s={row['seq_len'][:6]:6} b={row['micro_batch'][:3]:3}"
    return f"{grade(row):2} {what}"


def line(result: Result) -> str:
    """Return a row with family, figure, measurement, estimate and error."""
    beside = "  ".join(f"{name} {value:.1f}" for name, value in result.others.items())
    if result.allocated_error is not None:
        beside = f"allocated {float(result.row['allocated_gib']):.2f} {result.allocated_error:+.1f} %  {beside}"
    return (
        f"{_head(result.row)} {result.family:9} {result.figure:9} {measured(result.row):7.2f} {result.estimate:7.2f} "
        f"{result.error:+7.1f} %   {beside}"
    ).rstrip()


def summary(name: str, results: list[Result]) -> str:
    """Return the errors of ``results`` as one line of the table by family."""
    errors = [result.error for result in results]
    if not errors:
        return f"{name:16}    0"
    sizes = sorted(map(abs, errors))
    ninth = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    low = sum(error < LOW for error in errors)
    return (
        f"{name:16} {len(errors):4} {median(sizes):6.1f} % {ninth:6.1f} % {low:3} of {len(errors):2} "
        f"{min(errors):+7.1f} % {max(errors):+7.1f} %"
    )


def summaries(results: list[Result]) -> Iterator[str]:
    """Yield the table by family, of the rows that are fully specified, and of all."""
    yield f"{'family':16} rows   median     90th  >5 % low      from        to"
    for grades, text in ((("A", "A-"), ""), (("B",), " (B)")):
        graded = [result for result in results if grade(result.row) in grades]
        for family in FAMILY_ERRORS:
            yield summary(family + text, [result for result in graded if result.family == family])
        yield summary("all" + text, graded)


def beside(results: list[Result], name: str) -> str:
    """Return the error of another formula and ours on the rows that it covers."""
    rows = [result for result in results if name in result.others]
    theirs = median(abs(100 * (result.others[name] / measured(result.row) - 1)) for result in rows)
    ours = median(abs(result.error) for result in rows)
    return f"{name}: median absolute error {theirs:.1f} % on {len(rows)} full fine-tunes, ours {ours:.1f} %"


def allocations(results: list[Result]) -> Iterator[str]:
    """Yield the errors of the allocated tensors, where the source measured them."""
    errors = sorted(abs(result.allocated_error) for result in results if result.allocated_error is not None)
    if errors:
        yield f"allocated tensors: median {median(errors):.1f} %, largest {errors[-1]:.1f} % on {len(errors)} rows"


def margins(results: list[Result]) -> Iterator[str]:
    """Yield how many runs exceed the estimate with the margin that a plan calls enough, and why rows are too low."""
    graded = [result for result in results if grade(result.row) in ("A", "A-")]
    over = [
        item
        for item in graded
        if item.estimate * (1 + FAMILY_ERRORS[item.family].largest) < 0.9995 * measured(item.row)
    ]
    yield f"With the margin that a plan calls enough, {len(over)} of {len(graded)} runs need more than the estimate."
    yield "Too low by more than 5 %:"
    for result in graded:
        if result.error < LOW:
            yield f"{_head(result.row)} {result.error:+6.1f} %   {residual_of(result.row)}"


def _key(row: Row) -> tuple[str, ...]:
    return grade(row), row["source_url"], row["model"], row["strategy"]


def report(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of all tables; rows of grade E are not measurements."""
    found = [evaluate(row) for row in sorted(rows, key=_key) if grade(row) != "E"]
    results = [item for item in found if isinstance(item, Result)]
    yield from (line(result) for result in results)
    yield ""
    yield from summaries(results)
    yield from allocations(results)
    yield ""
    yield from margins(results)
    yield ""
    for name in ("deepspeed (states)", "accelerate", "cookbook"):
        if any(name in result.others for result in results):
            yield beside(results, name)
    yield "\nNo training runs; the constants are compared with the source that they come from:"
    for item in found:
        if isinstance(item, PartResult):
            error = 100 * (item.part.estimate / measured(item.row) - 1)
            figures = f"{item.part.figure:9} {measured(item.row):7.2f} {item.part.estimate:7.2f} {error:+7.1f} %"
            yield f"{_head(item.row)} {figures}"
    yield "\nNot modelled:"
    yield from (
        f"{_head(item.row)} {measured(item.row):7.2f}   {item.why}" for item in found if isinstance(item, Omitted)
    )


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=TRUTH)
    options = parser.parse_args()
    with options.csv.open() as file:
        print("\n".join(report(csv.DictReader(file))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
