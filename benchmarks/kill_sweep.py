"""SIGKILL a rank at every write of one save, for three engines and each rank; how many times training came back.

    python -m benchmarks.kill_sweep            # all points, about an hour on two cores; writes results/kill_sweep.json
    python -m benchmarks.kill_sweep zero3      # one strategy, printed only

Came back means: the newest checkpoint that counts is whole, and training resumed from it ends with the losses and, bit
for bit, the weights and optimizer states of a training that nothing disturbed. The method is tests/workflow/sweep.py.
The figure to compare with is Hugging Face's Trainer resumed by ``resume_from_checkpoint=True``: 2 of 52.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardmake.demo import make_inputs
from tests.nursery import Nursery
from tests.workflow.checkout import Checkout
from tests.workflow.forked import Forked
from tests.workflow.sweep import CASES, Sweep

RESULTS = Path(__file__).parent / "results/kill_sweep.json"


def main() -> None:
    wanted = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_inputs(root / "inputs")
        lab = Checkout.create(root / "checkout", root / "inputs")
        lab("shardmake", "data", "demo")
        nursery = Nursery()
        cases = [case for case in CASES if not wanted or case[0] in wanted]
        rows = [
            row for case in cases for row in swept(Sweep(Forked(lab, nursery), root / "-".join(map(str, case)), *case))
        ]
        nursery.close()
    recovered = sum(row["recovered"] for row in rows)
    print(f"recovered {recovered} of {len(rows)}")
    if not wanted:
        libraries = {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")}
        summary = {"recovered": recovered, "points": len(rows), "versions": libraries, "by_case": by_case(rows)}
        RESULTS.write_text(json.dumps(summary | {"rows": rows}, indent=1) + "\n")


def swept(sweep: Sweep) -> Iterator[dict[str, Any]]:
    sweep.prepare()
    for at, mode, what in sweep.points:
        found = sweep.survive(at, mode)
        row = {"strategy": sweep.strategy, "rank": sweep.victim, "write": what, "mode": mode}
        row |= {key: found[key] for key in ("killed", "left", "resumed_from", "recovered")}
        print(json.dumps(row), flush=True)
        yield row


def by_case(rows: list[dict[str, Any]]) -> dict[str, str]:
    names = dict.fromkeys(f"{row['strategy']} rank {row['rank']}" for row in rows)
    found = {
        name: [row["recovered"] for row in rows if f"{row['strategy']} rank {row['rank']}" == name] for name in names
    }
    return {name: f"{sum(each)} of {len(each)}" for name, each in found.items()}


if __name__ == "__main__":
    main()
