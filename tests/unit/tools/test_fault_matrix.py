"""The table of faults and strategies, from the report of the tests."""

import subprocess
from pathlib import Path

import pytest

from tools.fault_matrix import heading, loads_of, main, outcomes, row_and_column, table

REPORT = """<testsuites><testsuite>
<testcase classname="tests.cluster.test_faults" name="test_recovers[zero2-kill_rank]" time="61.4">
<properties><property name="tolerance" value="1e-06"/><property name="load" value="3.4"/></properties></testcase>
<testcase classname="tests.cluster.test_faults" name="test_recovers[fsdp-kill_rank]" time="70"><failure message="no"/></testcase>
<testcase classname="tests.cluster.test_faults" name="test_slurmdbd_down" time="30">
<properties><property name="tolerance" value="0.001"/><property name="load" value="11.2"/></properties></testcase>
<testcase classname="tests.cluster.test_faults" name="test_out_of_memory[zero3]" time="12"><skipped/></testcase>
<testcase classname="tests.cluster.test_driver_job" name="test_a_node_fails" time="99">
<properties><property name="load" value="2.0"/></properties></testcase>
</testsuite></testsuites>"""


def test_the_table_has_a_row_a_fault_and_a_column_a_strategy(tmp_path: Path) -> None:
    (report := tmp_path / "report.xml").write_text(REPORT)
    found = outcomes(report)
    lines = table(found.pop("fault_matrix.txt")).splitlines()
    assert [line.split() for line in lines] == [
        ["zero2", "zero3", "fsdp"],
        ["out", "of", "memory", "skipped"],
        ["recovers:", "kill", "rank", "61", "s", "failure"],
        ["slurmdbd", "down", "30", "s~"],
        [],
        ["2", "of", "4", "passed."],
    ]
    assert found == {"driver_job_matrix.txt": {"a node fails": {"": "99 s*"}}}


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
    assert loads == {"fault_matrix.txt": [3.4, 11.2], "driver_job_matrix.txt": [2.0]}
    assert heading(loads["fault_matrix.txt"]).endswith("at the ends of the tests: 3.4 to 11.2")


def test_every_table_of_a_report_names_the_same_clean_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.xml").write_text(REPORT.replace("test_driver_job", "test_requeue_faults"))
    tables = [tmp_path / "fault_matrix.txt", tmp_path / "requeue_matrix.txt"]
    for path in tables:
        path.write_text("of an earlier commit\n")
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "Start"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fault_matrix", "report.xml", "."])
    main()
    commits = {path.read_text().splitlines()[3].split(",")[0] for path in tables}
    assert len(commits) == 1
    assert "dirty" not in commits.pop()
