"""The table of faults and strategies, from the report of the tests."""

from pathlib import Path

import pytest

from tools.fault_matrix import main, row_and_column

CASE = """<testcase classname="tests.cluster.{file}" name="{name}" time="{time}"><properties>
<property name="commit" value="{commit}"/><property name="load" value="{load}"/>{more}</properties>{outcome}</testcase>
"""
EXACT = '<property name="tolerance" value="1e-06"/>'


def case(name: str, time: float, load: float, more: str = "", outcome: str = "", **values: str) -> str:
    given = {"file": "test_faults", "commit": "0123abc"} | values
    return CASE.format(name=name, time=time, load=load, more=more, outcome=outcome, **given)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two reports; the first has the tests of two tables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fault_matrix", "first.xml", "second.xml", "."])
    first = [
        case("test_recovers[zero2-kill_rank]", 61.4, 3.4, EXACT),
        case("test_recovers[fsdp-kill_rank]", 70, 5, EXACT, '<failure message="no"/>'),
        case("test_a_node_fails", 99, 2, file="test_driver_job"),
    ]
    second = [
        case("test_slurmdbd_down", 30, 11.2, '<property name="tolerance" value="0.001"/>'),
        case("test_out_of_memory[zero3]", 12, 1.9, outcome="<skipped/>"),
    ]
    for name, cases in {"first": first, "second": second}.items():
        Path(f"{name}.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return tmp_path


def test_the_table_has_a_row_a_fault_and_a_column_a_strategy(write: Path) -> None:
    main()
    heading, _, rows = (write / "fault_matrix.txt").read_text().partition("\n\n")
    assert "commit 0123abc, " in heading and heading.endswith("at the ends of the tests: 1.9 to 11.2")
    assert [line.split() for line in rows.splitlines()] == [
        ["zero2", "zero3", "fsdp"],
        ["out", "of", "memory", "skipped"],
        ["recovers:", "kill", "rank", "61", "s", "failure"],
        ["slurmdbd", "down", "30", "s~"],
        [],
        ["2", "of", "4", "passed,", "2", "of", "them", "compared", "with", "an", "undisturbed", "training."],
    ]
    heading, _, rows = (write / "driver_job_matrix.txt").read_text().partition("\n\n")
    assert heading.endswith("tests: 2.0 to 2.0") and rows.split()[:5] == ["a", "node", "fails", "99", "s*"]
    assert "1 of 1 passed, 0 of them compared" in rows


def test_tests_of_two_commits_make_no_table(write: Path) -> None:
    (write / "second.xml").write_text(f"<testsuite>{case('test_slurmdbd_down', 30, 1, commit='4567def')}</testsuite>")
    with pytest.raises(ValueError, match="too many values"):
        main()
    assert not (write / "fault_matrix.txt").exists()


def test_a_strategy_is_found_among_the_parameters() -> None:
    assert row_and_column("test_dies_in_a_save[zero2-before-the-record]") == (
        "dies in a save: before the record",
        "zero2",
    )
    assert row_and_column("test_resumes[flip_a_bit-fsdp]") == ("resumes: flip a bit", "fsdp")
    assert row_and_column("test_restarts[ddp-twice]") == ("restarts: twice", "ddp")
