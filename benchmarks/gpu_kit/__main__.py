"""Measure this machine's GPU, or prepare for one elsewhere: ``python -m benchmarks.gpu_kit [--prepare] [KIT]``.

With ``--prepare`` no GPU is needed: it plans and renders every case for ``--machine`` in ``KIT/work``. Without it,
these cases run on this machine, after they are prepared if they are not yet. The last lines are the rows for
docs/gpu.md, and the report is beside ``rows.jsonl`` in ``KIT/out``.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.cases import CASES, Case, label_of, settings_of
from benchmarks.gpu_kit.drive import Drive
from benchmarks.gpu_kit.machine import MACHINES, Machine, find_machine
from benchmarks.gpu_kit.prepare import CLUSTER, COMMIT, prepare
from shardmake.core.atomic import read_json
from shardmake.core.environment import checkout_commit, installed_versions
from shardmake.core.errors import ShardmakeError
from shardmake.core.units import GIB
from shardmake.doctor.gpu_report import AttentionErrors, Bare, GpuReport, Trained
from shardmake.doctor.trainings import LIBRARIES, judge
from shardmake.run.findings import Verdict

SECONDS = 480.0
AT_ONCE = 24


def choose(only: Sequence[str], machine: Machine) -> list[Case]:
    """Return the named cases with the trainings that they repeat, without those that cannot run on the machine."""
    wanted = {*only, *(word for case in CASES if case.name in only for word in case.program[1:])}
    named = [case for case in CASES if not only or case.name in wanted]
    if machine.is_cpu:
        return [case for case in named if not case.not_on_cpu]
    return [case for case in named if machine.memory >= case.gpu_gib * GIB]


def make_report(machine: Machine, rows: Sequence[dict[str, Any]], begun: float, work: Path) -> GpuReport:
    """Return the report of the rows of all cases, which were prepared in ``work``."""
    planned_for = read_json(work / CLUSTER, "--prepare")["accelerator"]
    done = {row["case"]: row for row in rows if row.get("ok")}
    by_name = {case.name: case for case in CASES}
    trained = [
        Trained.model_validate({**_part(row, Trained), "settings": settings_of(by_name[row["case"]])})
        for row in done.values()
        if "strategy" in row
    ]
    bare = [
        Bare.model_validate({**_part(row, Bare), "training": label_of(by_name[row["of"]], machine)})
        for row in done.values()
        if "trainer" in row
    ]
    rates: dict[str, float] = next((row["rates"] for row in done.values() if "rates" in row), {})
    attention = next((row["attention"] for row in done.values() if "attention" in row), None)
    outcomes = {
        row["case"]: "passed" if row["ok"] else "failed" if row.get("reached", True) else "skipped"
        for row in rows
        if "ok" in row
    }
    outcomes |= {found.check: "failed" for found in judge(trained) if found.verdict is not Verdict.OK}
    return GpuReport(
        time=begun, seconds=time.time() - begun, commit=checkout_commit() or read_json(work / COMMIT, "--prepare"),
        gpu=machine.gpu, accelerator=machine.accelerator, memory_gib=machine.memory / GIB, ranks=1,
        driver=machine.driver, cuda=machine.cuda, nccl=machine.nccl,
        versions={name: version for name, version in installed_versions(LIBRARIES).items() if version},
        outcomes=outcomes, trained=trained, bare=bare,
        attention=attention and AttentionErrors.model_validate(attention), rates=rates,
        changes="" if planned_for == machine.accelerator else f"the plans are for {planned_for}",
    )  # fmt: skip


def _part(row: dict[str, Any], record: type[Trained] | type[Bare]) -> dict[str, Any]:
    return {name: row[name] for name in record.model_fields if name in row}


def main() -> int:
    """Prepare or run, and return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kit", type=Path, nargs="?", default=Path("build/gpu-kit"))
    parser.add_argument("--prepare", action="store_true", help="Only prepare.")
    parser.add_argument("--machine", choices=sorted(MACHINES), help="Machine for --prepare; cpu rehearses.")
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="*", default=[], choices=names, help="Names of cases, in place of all.")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="End after so many seconds.")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="Cases beside each other.")
    options = parser.parse_args()
    try:
        machine = MACHINES[options.machine] if options.machine else find_machine()
    except ShardmakeError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    cases = choose(options.only, machine)
    if not cases:
        parser.error(f"{machine.gpu} has too little memory for these cases.")
    work, out = options.kit / "work", options.kit / "out"
    if options.prepare and work.exists():
        parser.error(f"{work} exists. Remove it to prepare again.")
    failed = {} if work.exists() else prepare(work, machine, cases)
    if options.prepare:
        return int(bool(failed))
    begun, planned_for = time.time(), read_json(work / CLUSTER, "--prepare")["accelerator"]
    if planned_for != machine.accelerator:
        print(f"Warning: the cases were planned for {planned_for}, and this machine has {machine.gpu}.")
    rows = Drive(work, out, machine, cases, options.seconds).run(options.at_once)
    report = make_report(machine, rows, begun, work)
    report.write(out / report.name)
    print("", *report.training_rows(), "", report.row(), sep="\n")
    return int("failed" in report.outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
