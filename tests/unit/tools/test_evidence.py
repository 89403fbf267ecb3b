"""The page of evidence is that of the stored results, and every test that it links exists and still makes its claims."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.evidence import claims_of
from tools import evidence

REPOSITORY = Path(__file__).resolve().parents[3]
CLAIM = {"shows": "killed", "strategy": "zero2", "method": "lora", "objective": "sft", "family": "llama"}


def test_the_page_is_that_of_the_results() -> None:
    assert evidence.PAGE.read_text() == evidence.page(evidence.stored(), evidence.gpu_claims()), "run: make docs"


def item(node: str, params: dict[str, Any], *markers: pytest.MarkDecorator) -> Any:
    """Return the parts of a collected test that matter."""
    marks = [marker.mark for marker in markers]
    return SimpleNamespace(nodeid=node, callspec=SimpleNamespace(params=params), iter_markers=lambda name: marks)


def test_claims_come_from_the_marker_and_the_parameters() -> None:
    proves = pytest.mark.proves
    found = claims_of(item("t", {"strategy": "zero2", "method": "lora"}, proves("killed", "fp32")))
    assert found == [CLAIM, CLAIM | {"shows": "fp32"}]
    found = claims_of(item("t", {"pair": ["ddp", "fsdp"]}, proves("saved", strategy=lambda params: params["pair"])))
    assert [(claim["strategy"], claim["method"]) for claim in found] == [("ddp", "full"), ("fsdp", "full")]
    for marker in (proves(strategy="ddp"), proves("magic", strategy="ddp"), proves("fp32", stragety="ddp")):
        with pytest.raises(pytest.UsageError, match="`proves` of t is not valid"):
            claims_of(item("t", {}, marker))


def report(folder: Path, outcome: str, commit: str = "c0ffee") -> Path:
    """Write the JUnit report of one test."""
    value = json.dumps({"node": "tests/a.py::test_b[zero2]", "commit": commit, "claims": [CLAIM]})
    entry = f"<property name='proves' value='{value}'/>"
    path = folder / "report.xml"
    path.write_text(f"<testsuites><testcase><properties>{entry}</properties>{outcome}</testcase></testsuites>")
    return path


def test_only_tests_that_passed_have_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "STORE", tmp_path / "evidence.json")
    monkeypatch.setattr(evidence, "PAGE", tmp_path / "evidence.md")
    monkeypatch.setattr(evidence, "GPU_RESULTS", tmp_path / "gpu")
    monkeypatch.setattr(sys, "argv", ["evidence", str(report(tmp_path, ""))])
    evidence.main()
    page = evidence.PAGE.read_text()
    assert "| zero2 | lora | sft | [1](#test-1) |  |  |  | [1](#test-1) |" in page and "| never |" in page
    assert '<a id="test-1"></a>1: `tests/a.py::test_b` with `[zero2]`' in page and "1 tests at commit c0ffee" in page
    report(tmp_path, "<failure/>")
    evidence.main()
    assert "[1]" not in evidence.PAGE.read_text()


@pytest.mark.parametrize("commit", ["c0ffee-dirty", "unknown"])
def test_results_without_a_commit_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], commit: str
) -> None:
    monkeypatch.setattr(evidence, "STORE", tmp_path / "evidence.json")
    for outcome, recorded in (("", commit), ("", "c0ffee"), ("<failure/>", commit)):
        evidence.update(evidence.stored(), [report(tmp_path, outcome, recorded)])
        assert ("without a commit: 1" in capsys.readouterr().out) == (recorded == commit)
    assert [found["commit"] for found in evidence.stored()["tests"].values()] == ["c0ffee"]


def test_every_stored_result_has_a_commit() -> None:
    assert [node for node, found in evidence.stored()["tests"].items() if not evidence.has_commit(found)] == []


def test_every_linked_test_exists_and_still_makes_its_claims(tmp_path: Path) -> None:
    """Collect the tests of the page without running them."""
    stored = {node: found["claims"] for node, found in evidence.stored()["tests"].items()}
    out = tmp_path / "claims.json"
    options = ["--collect-only", "-q", "-m", "proves", "-p", "no:cacheprovider", "--claims", str(out)]
    files = sorted({node.partition("::")[0] for node in stored})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
    now = json.loads(out.read_text())
    assert [node for node, claims in stored.items() if now.get(node) != claims] == []
