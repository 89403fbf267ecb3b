"""The limit on queued trainings, with a squeue that prints what the test wrote."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from shardmake.launch.submission import require_slot, submission_slot, waiting_message
from tests.unit.wording import Wording

MINE = "shardmake-mine-00000000"


@pytest.fixture
def slurm(slurm: Path) -> Path:
    (slurm / "queue").touch()
    return slurm


class WaitsError(Exception):
    """Raised instead of waiting in low memory."""


def wait(ahead: list[str] | None) -> NoReturn:
    raise WaitsError(ahead)


def queue(*runs: str) -> str:
    return "".join(f"{number}|PENDING||shardmake-{run}-12345678\n" for number, run in enumerate(runs))


@pytest.mark.parametrize("runs", [(), ("a",), ("a", "b")])
def test_slots_are_free_up_to_the_limit(slurm: Path, runs: tuple[str, ...]) -> None:
    (slurm / "queue").write_text(queue(*runs) + f"7|COMPLETING|c1|{MINE}\n8|RUNNING|c1|notebook\n")
    with submission_slot(MINE, 3, wait):
        pass
    with pytest.raises(WaitsError) as waits, submission_slot(MINE, len(runs), wait):
        pytest.fail("no slot was free")
    assert waits.value.args[0] == [f"shardmake-{run}-12345678" for run in runs]
    (slurm / "queue").unlink()
    with pytest.raises(WaitsError, match="None"), submission_slot(MINE, 3, wait):
        pytest.fail("it may be full while Slurm does not answer")


def test_a_job_that_was_just_submitted_counts(slurm: Path) -> None:
    """The shared snapshot still shows a free slot; under the lock squeue runs again."""
    with submission_slot(MINE, 1, wait):
        (slurm / "queue").write_text(queue("a"))
    require_slot("shardmake-other-1", 1, wait)
    with pytest.raises(WaitsError), submission_slot("shardmake-other-1", 1, wait):
        pytest.fail("the slot is taken")
    with pytest.raises(WaitsError, match="shardmake-a-12345678"):
        require_slot("shardmake-third-1", 1, wait)


SUBMIT = """
import sys, time
from pathlib import Path
from shardmake.launch.submission import submission_slot
def wait(ahead):
    sys.exit("waits")
with submission_slot(f"shardmake-{sys.argv[1]}-1", 2, wait), Path(sys.argv[2]).open("a") as queue:
    time.sleep(0.2)  # no other driver may query the queue while sbatch runs
    print(f"{sys.argv[1]}|PENDING||shardmake-{sys.argv[1]}-1", file=queue)
"""


def test_eight_drivers_at_once_take_two_slots(slurm: Path) -> None:
    variables = {**os.environ, "TMPDIR": str(slurm), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", SUBMIT]
    options = {"env": variables, "stderr": subprocess.PIPE}
    drivers = [subprocess.Popen([*command, str(n), str(slurm / "queue")], **options) for n in range(1, 9)]
    errors = [driver.communicate()[1] for driver in drivers]
    assert sorted(errors) == [b""] * 2 + [b"waits\n"] * 6
    assert len((slurm / "queue").read_text().splitlines()) == 2


def test_the_message_names_runs_and_setting(wording: Wording) -> None:
    ahead = ["shardmake-docs-chat-1a2b3c4d", "shardmake-code-00000000"]
    wording("\n".join(waiting_message(jobs, "mine", 2) for jobs in (ahead, None)))
