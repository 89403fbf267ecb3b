from pathlib import Path

import pytest

from tools.techniques import findings, passed_tests

REPORT = """<testsuites><testsuite>
<testcase classname="tests.workflow.test_a" name="test_x[one]"/>
<testcase classname="tests.workflow.test_a" name="test_x[two]">{end}</testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(("test", "end", "found"), [
    ("workflow/test_a.py::test_x", "", []), ("workflow/test_a.py", "", []),
    ("workflow/test_a.py::test_x[one]", "<failure/>", []),
    ("workflow/test_a.py::test_x", "<failure/>", ["ZeRO-9: workflow/test_a.py::test_x did not pass."]),
    ("workflow/test_a.py::test_x[two]", "<skipped/>", ["ZeRO-9: workflow/test_a.py::test_x[two] did not pass."]),
    ("workflow/test_a.py::test_y", "", ["ZeRO-9: workflow/test_a.py::test_y is gone or did not run."]),
])  # fmt: skip
def test_each_named_test_must_have_passed(tmp_path: Path, test: str, end: str, found: list[str]) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(end=end))
    assert findings({"ZeRO-9": {"tests": [test]}}, passed_tests([report]), tmp_path) == found


def test_a_page_must_hold_its_text(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("About MoQ.")
    rows = {
        "one": {"page": {"file": "page.md", "text": "MoQ"}},
        "two": {"page": {"file": "page.md", "text": "PLD"}},
        "three": {},
    }
    assert findings(rows, {}, tmp_path) == [
        "two: page.md does not mention 'PLD'.",
        "three: neither a test nor a page answers it.",
    ]
