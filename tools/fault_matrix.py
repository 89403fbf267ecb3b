"""Write the outcome of every fault for every strategy: ``python -m tools.fault_matrix REPORT... OUT``.

REPORT is the JUnit file of ``make test-faults``; OUT becomes a table with the seconds of each test that passed. Further
reports are of tests that were run again, and replace their outcome, marked with an asterisk.
"""

import os
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

COLUMNS = ("ddp", "zero2", "zero3", "fsdp")
LIBRARIES = ("torch", "deepspeed", "accelerate", "transformers", "snakemake", "submitit")


def main() -> None:
    """Read the report and write the table, headed by commit, machine and versions."""
    *reports, out = map(Path, sys.argv[1:])
    out.write_text(f"{heading()}\n\n{table(outcomes(*reports))}\n")


def outcomes(*reports: Path) -> dict[str, dict[str, str]]:
    """Return what became of each test, by the test's name and its strategy (``""`` if it has no parameter)."""
    rows: dict[str, dict[str, str]] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            name, strategy = row_and_column(case.attrib["name"])
            kinds = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
            again = "*" if strategy in rows.get(name, {}) else ""
            rows.setdefault(name, {})[strategy] = again + (kinds[0] if kinds else f"{float(case.attrib['time']):.0f} s")
    return rows


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
    lines = [f"{'':{width}}" + "".join(f"{column:>10}" for column in columns)]
    for name, found in sorted(rows.items()):
        cells = [found[""]] if "" in found else [found.get(column, "") for column in columns]
        lines.append(f"{name:{width}}" + "".join(f"{cell:>10}" for cell in cells))
    values = [value for found in rows.values() for value in found.values()]
    passed = sum(value.endswith(" s") for value in values)
    again = sum(value.startswith("*") for value in values)
    last = f"{passed} of {len(values)} passed{f', {again} of them when they were run again (*)' if again else ''}."
    return "\n".join([*(line.rstrip() for line in lines), "", last])


def heading() -> str:
    """Return commit, machine and versions of this process."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    libraries = " ".join(f"{name} {version(name)}" for name in LIBRARIES)
    return (
        "Each fault on the three-node Slurm: the training ends with the losses and weights of an undisturbed one.\n"
        f"commit {commit.stdout.strip()}, {os.cpu_count()} cores, Python {platform.python_version()}, {libraries}"
    )


if __name__ == "__main__":
    main()
