"""Whose turn it is to submit, held against a squeue that prints what the test wrote."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from shardmake.launch.submission_limit import require_slot, submission_slot, waiting_message

MINE = "shardmake-mine-00000000"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A squeue that prints the file ``queue`` and does not answer where there is none; a runtime folder of its own."""
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin/squeue"
    tool.write_text(f"#!/bin/sh\ncat {tmp_path}/queue\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "queue").write_text("")
    return tmp_path


class WaitsError(Exception):
    """In place of dozing."""


def wait(ahead: list[str] | None) -> NoReturn:
    raise WaitsError(ahead)


def queue(*runs: str) -> str:
    return "".join(f"{number}|PENDING|shardmake-{run}-12345678\n" for number, run in enumerate(runs))


@pytest.mark.parametrize("runs", [(), ("a",), ("a", "b")])
def test_there_is_room_up_to_the_limit(slurm: Path, runs: tuple[str, ...]) -> None:
    (slurm / "queue").write_text(queue(*runs) + f"7|COMPLETING|{MINE}\n8|RUNNING|notebook\n")
    with submission_slot(MINE, 3, wait):
        pass
    with pytest.raises(WaitsError) as waits, submission_slot(MINE, len(runs), wait):
        pytest.fail("there was no room")
    assert waits.value.args[0] == [f"shardmake-{run}-12345678" for run in runs]


def test_a_slurm_that_does_not_answer_gives_no_room(slurm: Path) -> None:
    (slurm / "queue").unlink()
    with pytest.raises(WaitsError, match="None"), submission_slot(MINE, 3, wait):
        pytest.fail("it may be full")


def test_what_was_submitted_a_moment_ago_counts(slurm: Path) -> None:
    """The shared snapshot still says that there is room; under the lock Slurm itself is asked."""
    with submission_slot(MINE, 1, wait):
        (slurm / "queue").write_text(queue("a"))
    require_slot("shardmake-other-1", 1, wait)
    with pytest.raises(WaitsError), submission_slot("shardmake-other-1", 1, wait):
        pytest.fail("the place is taken")
    with pytest.raises(WaitsError, match="shardmake-a-12345678"):
        require_slot("shardmake-third-1", 1, wait)


SUBMIT = """
import sys, time
from pathlib import Path
from shardmake.launch.submission_limit import submission_slot
def wait(ahead):
    sys.exit("waits")
with submission_slot(f"shardmake-{sys.argv[1]}-1", 2, wait), Path(sys.argv[2]).open("a") as queue:
    time.sleep(0.2)  # sbatch takes its time, in which another driver must not look
    print(f"{sys.argv[1]}|PENDING|shardmake-{sys.argv[1]}-1", file=queue)
"""


def test_eight_drivers_at_once_take_two_places(slurm: Path) -> None:
    variables = {**os.environ, "TMPDIR": str(slurm), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", SUBMIT]
    drivers = [
        subprocess.Popen([*command, str(number), str(slurm / "queue")], env=variables, stderr=subprocess.PIPE)
        for number in range(1, 9)
    ]
    said = [driver.communicate()[1] for driver in drivers]
    assert sorted(said) == [b""] * 2 + [b"waits\n"] * 6
    assert len((slurm / "queue").read_text().splitlines()) == 2


def test_the_reason_names_runs_and_setting() -> None:
    ahead = ["shardmake-docs-chat-1a2b3c4d", "shardmake-code-00000000"]
    assert waiting_message(ahead, "mine", 2) == (
        "You have 2 training(s) in the queue (code, docs-chat), and trainings_per_user in the cluster file is 2: mine "
        "waits for one of them to end."
    )
    assert "Slurm does not answer" in waiting_message(None, "mine", 2)
