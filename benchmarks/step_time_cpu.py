"""Compare the modelled step time with real trainings on the CPU: ``python -m benchmarks.step_time_cpu``.

Each row is a training of the workflow itself: two ranks on this machine, one strategy, one size of a Llama. The
measured time is the median of the logged rates without the first ten steps, in which libraries warm up. The model's
four constants for CPUs were fitted to such rows on one machine, so the table says how well so few constants describe
many trainings; on another machine the ratio to ddp at the same size says more. It takes about 25 minutes on two idle
cores; the load of the machine is kept with the result, because it decides whether the figures mean anything.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.step_time_accuracy import rank_correlation
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.run.metrics import read_metrics
from shardmake.run.paths import RunDir
from shardmake.run.plan import MemoryEstimates, Plan

RESULTS = Path(__file__).parent / "results/step_time_cpu.txt"
SIZES = {"small": (256, 4), "medium": (384, 6), "large": (512, 8)}
"""Hidden size and layers."""
STEPS, WARM_UP = 40, 10
RUN = {
    "sequence_length": 128, "global_batch_size": 16, "micro_batch_size": 4, "nodes": 1, "gradient_checkpointing": False,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Seconds per optimizer step of one training."""

    size: str
    strategy: str
    measured: float
    modelled: float

    @property
    def ratio(self) -> float:
        """Return modelled over measured."""
        return self.modelled / self.measured


def strategies() -> list[str]:
    """Return the strategies that run on one node without a GPU and without an NVMe folder."""
    wanted = STRATEGY_SPECS.items()
    return [name for name, spec in wanted if not (spec.is_fsdp or spec.uses_nvme or spec.hybrid or spec.hpz)]


def measure(checkout: Any, size: str, strategy: str) -> Row:
    """Train one row in ``checkout``, whose model has the size."""
    checkout.configure({}, strategy=strategy, max_steps=STEPS, checkpoints={"every_steps": STEPS}, **RUN)
    checkout.stages("plan", "render", "data", "train")
    run = RunDir(checkout.run)
    modelled = MemoryEstimates.read(run.memory).of(Plan.read(run.plan).choice).step_seconds
    rates = [line.tokens_per_second for line in read_metrics(run.metrics) if line.step > WARM_UP]
    tokens = RUN["global_batch_size"] * RUN["sequence_length"]
    measured = tokens / statistics.median(rate for rate in rates if rate is not None)
    return Row(size, strategy, measured, modelled)


def report(rows: Sequence[Row], load: Sequence[float]) -> str:
    """Return the table, and per size the rank correlation over strategies."""
    lines = [f"{'size':<8} {'strategy':<24} {'measured s':>11} {'modelled s':>11} {'ratio':>6} {'to ddp':>7}"]
    for size in SIZES:
        of_size = [row for row in rows if row.size == size]
        ddp = next((row.ratio for row in of_size if row.strategy == "ddp"), float("nan"))
        lines += [
            f"{row.size:<8} {row.strategy:<24} {row.measured:>11.3f} {row.modelled:>11.3f} {row.ratio:>6.2f} "
            f"{row.ratio / ddp:>7.2f}"
            for row in of_size
        ]
    for name, chosen in (*((size, [row for row in rows if row.size == size]) for size in SIZES), ("all", rows)):
        if len(chosen) > 2:
            ratio = statistics.median(row.ratio for row in chosen)
            spread = statistics.median(abs(row.ratio / ratio - 1) for row in chosen)
            ranks = rank_correlation([row.measured for row in chosen], [row.modelled for row in chosen])
            lines.append(
                f"{name}: median ratio {ratio:.2f}, median deviation from it {spread:.1%}, rank correlation {ranks:.2f}"
            )
    lines.append(f"load of the machine before and after: {load[0]:.1f}, {load[1]:.1f}; cores: {os.cpu_count()}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all rows, print the table and keep it."""
    from benchmarks.saving import enlarge
    from shardmake.demo import make_inputs
    from tests.workflow.checkout import Checkout

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--strategy", nargs="*", choices=strategies(), default=strategies())
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    before, rows = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_inputs(root / "inputs")
        for size in options.size:
            hidden, layers = SIZES[size]
            shape = {"hidden_size": hidden, "intermediate_size": 8 * hidden // 3, "num_hidden_layers": layers}
            enlarge(root / "inputs/base", shape | {"num_attention_heads": 8, "num_key_value_heads": 8})
            for strategy in options.strategy:
                checkout = Checkout.create(root / f"{size}-{strategy}", root / "inputs")
                rows.append(measure(checkout, size, strategy))
                print(rows[-1], flush=True)
    text = report(rows, (before, os.getloadavg()[0]))
    print(text, end="")
    options.results.write_text(text)


if __name__ == "__main__":
    main()
