"""The table of faults and strategies, from the report of the tests."""

from pathlib import Path

from tools.fault_matrix import heading, loads_of, outcomes, row_and_column, table

REPORT = """<testsuites><testsuite>
<testcase classname="tests.cluster.test_faults" name="test_recovers[zero2-kill_rank]" time="61.4">
<properties><property name="load" value="3.4"/></properties></testcase>
<testcase classname="tests.cluster.test_faults" name="test_recovers[fsdp-kill_rank]" time="70"><failure message="no"/></testcase>
<testcase classname="tests.cluster.test_faults" name="test_slurmdbd_down" time="30">
<properties><property name="load" value="11.2"/></properties></testcase>
<testcase classname="tests.cluster.test_faults" name="test_out_of_memory[zero3]" time="12"><skipped/></testcase>
<testcase classname="tests.cluster.test_driver_job" name="test_a_node_fails" time="99"/>
</testsuite></testsuites>"""


def test_the_table_has_a_row_a_fault_and_a_column_a_strategy(tmp_path: Path) -> None:
    (report := tmp_path / "report.xml").write_text(REPORT)
    found = outcomes(report)
    lines = table(found.pop("fault_matrix.txt")).splitlines()
    assert [line.split() for line in lines] == [
        ["zero2", "zero3", "fsdp"],
        ["out", "of", "memory", "skipped"],
        ["recovers:", "kill", "rank", "61", "s", "failure"],
        ["slurmdbd", "down", "30", "s"],
        [],
        ["2", "of", "4", "passed."],
    ]
    assert found == {"driver_job_matrix.txt": {"a node fails": {"": "99 s"}}}


def test_a_strategy_is_found_among_the_parameters() -> None:
    assert row_and_column("test_dies_in_a_save[zero2-before-the-record]") == (
        "dies in a save: before the record",
        "zero2",
    )
    assert row_and_column("test_resumes[flip_a_bit-fsdp]") == ("resumes: flip a bit", "fsdp")
    assert row_and_column("test_restarts[ddp-twice]") == ("restarts: twice", "ddp")


def test_the_heading_has_the_loads_of_its_tests(tmp_path: Path) -> None:
    (report := tmp_path / "report.xml").write_text(REPORT)
    loads = loads_of(report)
    assert loads == {"fault_matrix.txt": [3.4, 11.2], "driver_job_matrix.txt": []}
    assert heading(loads["fault_matrix.txt"]).endswith("at the ends of the tests: 3.4 to 11.2")
