"""Write the outcome of every fault for every strategy: ``python -m tools.fault_matrix REPORT... FOLDER``.

REPORT is the JUnit file of ``make test-faults``, or of some of its tests; of a test in several, the last one counts.
FOLDER gets fault_matrix.txt, with the seconds of each fault whose training passed, or of each other test that passed.
"""

import os
import platform
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

COLUMNS = ("ddp", "zero2", "zero3", "fsdp")
LIBRARIES = ("torch", "deepspeed", "accelerate", "transformers", "snakemake", "submitit")


NAME = "fault_matrix.txt"
Cases = Sequence[ElementTree.Element]
LOAD = "load"
"""The property of a test in the report: the load average over five minutes at its end."""
COMMIT = "commit"
"""The property of a test in the report: the commit of the checkout."""
FAULT = "fault"
"""The property of a training in the report, one for each fault: its seconds and its name."""
TOLERANCE = "tolerance"
"""The property of a test that compared losses and weights with an undisturbed training: the difference it allowed."""
EXACT = 0.0
"""The difference that a comparison allows if ranks and micro batches stay as they were."""


def main() -> None:
    """Read the reports and write the tables, headed by commit, machine, load and versions."""
    *reports, folder = map(Path, sys.argv[1:])
    read = (case for report in reports for case in ElementTree.parse(report).iter("testcase"))
    cases = list({case.attrib["name"]: case for case in read}.values())
    (folder / NAME).write_text(f"{heading(cases)}\n\n{table(outcomes(cases))}\n\n{summary(cases)}\n")


def outcomes(cases: Cases) -> dict[str, dict[str, str]]:
    """Return what became of each fault, by name and strategy (``""`` if the test has no parameter)."""
    rows: dict[str, dict[str, str]] = {}
    for case in cases:
        name, strategy = row_and_column(case.attrib["name"])
        faults = [value.split(" ", 1) for value in properties([case], FAULT)] or [[case.attrib["time"], name]]
        for seconds, fault in faults:
            found = failure(case) or f"{float(seconds):.0f} s{mark(case)}"
            rows.setdefault(fault.replace("_", " "), {})[strategy] = found
    return rows


def failure(case: ElementTree.Element) -> str | None:
    """Return how a test did not pass; None if it passed."""
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), None)


def mark(case: ElementTree.Element) -> str:
    """Return what the table says of a test's comparison with an undisturbed training."""
    found = properties([case], TOLERANCE)
    return "*" if not found else "~" if float(found[0]) > EXACT else ""


def properties(cases: Cases, name: str) -> list[str]:
    """Return the values of a property of tests."""
    return [entry.attrib["value"] for case in cases for entry in case.iterfind(f"properties/property[@name='{name}']")]


def row_and_column(test: str) -> tuple[str, str]:
    """Split ``test_some_fault[zero2-detail]`` into ``some fault: detail`` and ``zero2``."""
    name, _, parameters = test.removeprefix("test_").removesuffix("]").partition("[")
    words = parameters.split("-", 1)
    strategy = next((word for word in words if word in COLUMNS), "")
    detail = " ".join(word for word in words if word != strategy)
    return re.sub(r"[_-]", " ", f"{name}: {detail}" if detail else name), strategy


def table(rows: dict[str, dict[str, str]]) -> str:
    """Return one line a fault, one column a strategy that occurs, and the count of tests that passed."""
    width = max(map(len, rows))
    columns = [column for column in COLUMNS if any(column in found for found in rows.values())]
    lines = [f"{'':{width}}" + "".join(f"{column:>10}" for column in columns)] if columns else []
    for name, found in sorted(rows.items()):
        cells = [found[""]] if "" in found else [found.get(column, "") for column in columns]
        lines.append(f"{name:{width}}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def summary(cases: Cases) -> str:
    """Return how many tests passed, and how many of them compared a training."""
    passed = [case for case in cases if not failure(case)]
    compared = sum(bool(properties([case], TOLERANCE)) for case in passed)
    return f"{len(passed)} of {len(cases)} tests passed, {compared} of them compared with an undisturbed training."


def heading(cases: Cases) -> str:
    """Return commits, machine and versions, and the smallest and largest load at the end of a test."""
    commits = Counter(properties(cases, COMMIT)).most_common()
    commit = ", ".join(f"{name} ({tests} test{'s' * (tests > 1)})" for name, tests in commits)
    loads = [float(value) for value in properties(cases, LOAD)]
    libraries = " ".join(f"{name} {version(name)}" for name in LIBRARIES)
    return (
        "Each fault on the three-node Slurm, and its seconds; one training has several. Without a mark, the training\n"
        "ended with the losses and weights of an undisturbed one, bit for bit; ~ within 0.001, because ranks or micro\n"
        "batches changed on the way; * the test checks something else, such as that no step is done twice.\n"
        f"commit {commit}, {os.cpu_count()} cores, Python {platform.python_version()}, {libraries}\n"
        f"load averages over five minutes, at the ends of the tests: {min(loads):.1f} to {max(loads):.1f}"
    )


if __name__ == "__main__":
    main()
