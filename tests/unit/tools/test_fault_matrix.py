"""The table of faults and strategies, from the report of the tests."""

from pathlib import Path

import pytest

from tools.fault_matrix import main, row_and_column

CASE = """<testcase classname="tests.cluster.{file}" name="{name}" time="{time}"><properties>
<property name="commit" value="{commit}"/><property name="load" value="{load}"/>{more}</properties>{outcome}</testcase>
"""
EXACT = '<property name="tolerance" value="0.0"/>'
FAULTS = '<property name="fault" value="61 kill_rank"/><property name="fault" value="9 stop_rank"/>'


def case(name: str, time: float, load: float, more: str = "", outcome: str = "", **values: str) -> str:
    given = {"file": "test_faults", "commit": "0123abc"} | values
    return CASE.format(name=name, time=time, load=load, more=more, outcome=outcome, **given)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two reports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fault_matrix", "first.xml", "second.xml", "."])
    first = [
        case("test_recovers_from[zero2-ranks]", 161.4, 3.4, FAULTS + EXACT),
        case("test_recovers_from[fsdp-ranks]", 170, 5, FAULTS + EXACT, '<failure message="no"/>'),
        case("test_a_node_fails", 99, 2, file="test_driver_job"),
    ]
    second = [
        case("test_slurmdbd_down[ddp]", 30, 11.2, '<property name="tolerance" value="0.001"/>'),
        case("test_out_of_memory[zero3]", 12, 1.9, outcome="<skipped/>"),
    ]
    for name, cases in {"first": first, "second": second}.items():
        Path(f"{name}.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return tmp_path


def test_the_table_has_a_row_a_fault_and_a_column_a_strategy(write: Path) -> None:
    main()
    heading, _, rows = (write / "fault_matrix.txt").read_text().partition("\n\n")
    assert "commit 0123abc (5 tests), " in heading and heading.endswith("at the ends of the tests: 1.9 to 11.2")
    assert [" ".join(line.split()) for line in rows.splitlines()] == [
        "ddp zero2 zero3 fsdp", "a node fails 99 s*", "kill rank 61 s failure", "out of memory skipped",
        "slurmdbd down 30 s~", "stop rank 9 s failure", "",
        "3 of 5 tests passed, 2 of them compared with an undisturbed training.",
    ]  # fmt: skip


def test_a_test_that_ran_again_counts_once_with_its_commit(write: Path) -> None:
    again = case("test_out_of_memory[zero3]", 20, 1, commit="4567def")
    (write / "second.xml").write_text(f"<testsuite>{again * 2}</testsuite>")
    main()
    heading, _, rows = (write / "fault_matrix.txt").read_text().partition("\n\n")
    assert "commit 0123abc (3 tests), 4567def (1 test), " in heading and "3 of 4 tests passed" in rows


def test_a_strategy_is_found_among_the_parameters() -> None:
    assert row_and_column("test_dies_in_a_save[zero2-before-the-record]") == (
        "dies in a save: before the record",
        "zero2",
    )
    assert row_and_column("test_resumes[flip_a_bit-fsdp]") == ("resumes: flip a bit", "fsdp")
    assert row_and_column("test_restarts[ddp-twice]") == ("restarts: twice", "ddp")
