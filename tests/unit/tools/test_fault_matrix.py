"""The table of faults and strategies, from the report of the tests."""

from pathlib import Path

from tools.fault_matrix import outcomes, row_and_column, table

REPORT = """<testsuites><testsuite>
<testcase name="test_recovers[zero2-kill_rank]" time="61.4"/>
<testcase name="test_recovers[fsdp-kill_rank]" time="70"><failure message="no"/></testcase>
<testcase name="test_slurmdbd_down" time="30"/>
<testcase name="test_out_of_memory[zero3]" time="12"><skipped/></testcase>
</testsuite></testsuites>"""


def test_the_table_has_a_row_a_fault_and_a_column_a_strategy(tmp_path: Path) -> None:
    (report := tmp_path / "report.xml").write_text(REPORT)
    lines = table(outcomes(report)).splitlines()
    assert [line.split() for line in lines] == [
        ["zero2", "zero3", "fsdp"],
        ["out", "of", "memory", "skipped"],
        ["recovers:", "kill", "rank", "61", "s", "failure"],
        ["slurmdbd", "down", "30", "s"],
        [],
        ["2", "of", "4", "passed."],
    ]


def test_a_test_that_was_run_again_is_marked(tmp_path: Path) -> None:
    (first := tmp_path / "first.xml").write_text(REPORT)
    (again := tmp_path / "again.xml").write_text('<x><testcase name="test_recovers[fsdp-kill_rank]" time="81"/></x>')
    lines = table(outcomes(first, again)).splitlines()
    assert lines[2].split() == ["recovers:", "kill", "rank", "61", "s", "*81", "s"]
    assert lines[-1] == "3 of 4 passed, 1 of them when they were run again (*)."


def test_a_strategy_is_found_among_the_parameters() -> None:
    assert row_and_column("test_dies_in_a_save[zero2-before-the-record]") == (
        "dies in a save: before the record",
        "zero2",
    )
    assert row_and_column("test_resumes[flip_a_bit-fsdp]") == ("resumes: flip a bit", "fsdp")
    assert row_and_column("test_restarts[ddp-twice]") == ("restarts: twice", "ddp")
