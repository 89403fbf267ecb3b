"""Check that the tests of ``tests/techniques.yaml`` ran and passed, from the JUnit reports of a run of the tests.

``python -m tools.techniques REPORT...`` prints what is missing and then fails; ``.ci/run`` ends with it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

ROOT = Path(__file__).resolve().parents[1]


def passed_tests(reports: Sequence[Path]) -> dict[str, bool]:
    """Return the ids below ``tests`` of the tests in JUnit ``reports``, and whether each ran and passed."""
    found: dict[str, bool] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            file = case.attrib["classname"].removeprefix("tests.").replace(".", "/") + ".py"
            node = f"{file}::{case.attrib['name']}"
            found[node] = all(case.find(end) is None for end in ("failure", "error", "skipped")) and found.get(
                node, True
            )
    return found


def findings(techniques: dict[str, Any], passed: dict[str, bool], root: Path) -> list[str]:
    """Return a sentence for each test that is gone, did not run or did not pass, and each page without its text."""
    found = []
    for name, row in techniques.items():
        for test in row.get("tests", []):
            cases = [ok for node, ok in passed.items() if node == test or node.startswith((f"{test}[", f"{test}::"))]
            if not cases or not all(cases):
                found.append(f"{name}: {test} {'did not pass' if cases else 'is gone or did not run'}.")
        page = row.get("page")
        if page and page["text"] not in (root / page["file"]).read_text():
            found.append(f"{name}: {page['file']} does not mention {page['text']!r}.")
        if not row.get("tests") and not page:
            found.append(f"{name}: neither a test nor a page answers it.")
    return found


def main(reports: Sequence[str]) -> str:
    """Return the findings, one a line."""
    techniques = yaml.safe_load((ROOT / "tests" / "techniques.yaml").read_text())
    return "\n".join(findings(techniques, passed_tests([Path(report) for report in reports]), ROOT))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or 0)
