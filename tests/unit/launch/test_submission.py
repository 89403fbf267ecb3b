"""The limit on queued trainings, and the snapshots of squeue that drivers share; squeue prints what the test wrote."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import pytest

from shardmake.launch import watcher
from shardmake.launch.slurm_jobs import waiting_snapshot
from shardmake.launch.submission import require_slot, submission_slot, waiting_message
from shardmake.launch.watcher import add_row, cached_squeue, is_fresh, open_snapshot
from tests.programs import count_calls
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


ROWS = "7|RUNNING|c1|shardmake-chat-1\n"


@pytest.fixture
def queued(slurm: Path) -> Path:
    (slurm / "queue").write_text(ROWS)
    return slurm


def test_one_query_serves_many_until_a_new_one_is_required(queued: Path) -> None:
    snapshot = str(queued / "snapshot")
    assert [cached_squeue(snapshot, 20) for _ in range(3)] == [ROWS] * 3
    assert count_calls(queued) == 1
    (queued / "queue").write_text("")
    assert cached_squeue(snapshot, 0) == "" == cached_squeue(snapshot, 20)
    assert count_calls(queued) == 2
    (queued / "queue").unlink()
    assert cached_squeue(snapshot, 0) is None
    assert cached_squeue(snapshot, 20) is None and count_calls(queued) == 3, "a failure counts for a while"


def test_an_added_row_stays_until_the_next_query(queued: Path) -> None:
    snapshot = str(queued / "snapshot")
    cached_squeue(snapshot)
    file = open_snapshot(snapshot)
    add_row(file, "0|CLAIMED||shardmake-code-1")
    os.close(file)
    assert cached_squeue(snapshot) == f"{ROWS}0|CLAIMED||shardmake-code-1\n"
    assert cached_squeue(snapshot, 0) == ROWS


def test_an_incomplete_snapshot_and_a_full_disk_hide_no_answer(queued: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (queued / "snapshot").write_text("7|PENDING|(None)|shardm")
    assert cached_squeue(str(queued / "snapshot"), 20) == ROWS
    (queued / "snapshot").unlink()
    monkeypatch.setattr(watcher.os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert cached_squeue(str(queued / "snapshot")) == ROWS
    (queued / "timeout").symlink_to("/usr/bin/timeout")
    monkeypatch.setenv("PATH", str(queued))
    assert cached_squeue(str(queued / "other")) is None, "a missing squeue is a failed query"


@pytest.mark.parametrize(("query_seconds", "answered", "max_age", "lasts"), [
    (0.01, True, 2, 2), (2.0, True, 2, 40), (9.0, True, 2, 60), (0.01, True, 20, 20),
    (0.01, False, 2, 10), (9.0, False, 2, 60), (60.0, False, 2, 60), (0.01, False, 20, 20),
])  # fmt: skip
def test_how_long_a_snapshot_counts(query_seconds: float, answered: bool, max_age: float, lasts: float) -> None:
    ages = (lasts - 0.1, lasts + 0.1, -1)
    assert [is_fresh(age, max_age, query_seconds, answered) for age in ages] == [True, False, False]
    assert not is_fresh(0, 0, query_seconds, answered) and not is_fresh(0, max_age, None, answered)


POLL = """
import sys, time
from shardmake.launch.watcher import cached_squeue
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    assert cached_squeue(sys.argv[2]) == "7|RUNNING|c1|shardmake-chat-1\\n"
    time.sleep(0.05)
"""


def test_many_processes_share_one_query(queued: Path) -> None:
    """Six processes poll for 1.5 seconds, twenty times a second each; squeue runs at most twice."""
    snapshot = str(queued / "snapshot")
    cached_squeue(snapshot)
    variables = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    started = time.monotonic()
    drivers = [subprocess.Popen([sys.executable, "-c", POLL, "1.5", snapshot], env=variables) for _ in range(6)]
    assert [driver.wait() for driver in drivers] == [0] * 6
    assert count_calls(queued) <= 2 + (time.monotonic() - started) / 2


def test_clusters_with_configurations_of_one_name_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in two containers of one machine."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", str(configuration := tmp_path / "slurm.conf"))
    files = [waiting_snapshot()]
    for text in ("SlurmctldHost=a", "SlurmctldHost=b", "SlurmctldHost=a"):
        configuration.write_text(text)
        files.append(waiting_snapshot())
    assert len(set(files)) == 3 and files[1] == files[3]
