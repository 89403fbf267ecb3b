"""Kill a rank at every write of one save, for three strategies and each rank, and count the trainings that recover.

    python -m benchmarks.kill_sweep                 # all points, 22 minutes on two cores
    python -m benchmarks.kill_sweep fsdp            # one strategy
    python -m benchmarks.kill_sweep --nodes 2       # the cases of two nodes, also with the names of strategies

A case is a strategy, the rank that is killed, and the number of nodes. On two nodes the points are those that one node
does not have: the writes of node 1, the merge of the listings, and a node's validation of its share. When a case is
done, its rows replace those of the same case in results/kill_sweep.json.

A training recovers if its newest committed checkpoint is complete and the resumed training ends as an uninterrupted
one: with the same losses and, bit for bit, the same weights and optimizer states. The method is that of
tests/workflow/sweep.py.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import Load, machine
from shardmake.demo import make_inputs
from tests.fork_server import ForkServer
from tests.workflow.checkout import Checkout
from tests.workflow.forked import Forked
from tests.workflow.sweep import CASES, Sweep

RESULTS = Path(__file__).parent / "results/kill_sweep.json"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("strategies", nargs="*")
    parser.add_argument("--nodes", type=int)
    chosen = parser.parse_args()
    cases = [case for case in CASES if case[0] in (chosen.strategies or case) and case[2] == (chosen.nodes or case[2])]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_inputs(root / "inputs")
        checkout = Checkout.create(root / "checkout", root / "inputs")
        checkout("shardmake", "data", "demo")
        server = ForkServer()
        for case in cases:
            before = os.getloadavg()
            keep(list(swept(Sweep(Forked(checkout, server), root / "-".join(map(str, case)), *case))), before)
        server.close()


def keep(rows: list[dict[str, Any]], before: Load) -> None:
    """Put the rows of a case into the results; ``before`` is the load of the machine when it began."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    case, found = case_of(rows[0]), machine(before=before)
    others = [row for row in known.get("rows", []) if case_of(row) != case]
    rows = others + [row | {"versions": found["versions"]} for row in rows]
    recovered = sum(row["recovered"] for row in rows)
    summary = {"recovered": recovered, "points": len(rows), "by_case": by_case(rows)}
    print(json.dumps(summary), flush=True)
    machines = known.get("machines", {}) | {case: found}
    RESULTS.write_text(json.dumps(summary | {"machines": machines, "rows": rows}, indent=1) + "\n")


def swept(sweep: Sweep) -> Iterator[dict[str, Any]]:
    sweep.prepare()
    for at, mode, what in sweep.points:
        found = sweep.survive(at, mode)
        row = {"strategy": sweep.strategy, "rank": sweep.victim, "nodes": sweep.nodes, "write": what, "mode": mode}
        row |= {key: found[key] for key in ("killed", "left", "resumed_from", "recovered")}
        print(json.dumps(row), flush=True)
        yield row


def case_of(row: dict[str, Any]) -> str:
    nodes = row.get("nodes", 1)
    return f"{row['strategy']} rank {row['rank']}" + (f" of {nodes} nodes" if nodes > 1 else "")


def by_case(rows: list[dict[str, Any]]) -> dict[str, str]:
    found: dict[str, list[bool]] = {}
    for row in rows:
        found.setdefault(case_of(row), []).append(row["recovered"])
    return {name: f"{sum(each)} of {len(each)}" for name, each in found.items()}


if __name__ == "__main__":
    main()
