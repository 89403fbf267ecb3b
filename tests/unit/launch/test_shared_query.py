"""Snapshots of squeue that drivers share."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from shardmake.launch import watcher
from shardmake.launch.slurm_jobs import waiting_snapshot
from shardmake.launch.watcher import add_row, cached_squeue, is_fresh, open_snapshot
from tests.programs import count_calls

ROWS = "7|RUNNING|c1|shardmake-chat-1\n"


@pytest.fixture
def slurm(slurm: Path) -> Path:
    (slurm / "queue").write_text(ROWS)
    return slurm


def test_one_query_serves_many_until_a_new_one_is_required(slurm: Path) -> None:
    snapshot = str(slurm / "snapshot")
    assert [cached_squeue(snapshot, 20) for _ in range(3)] == [ROWS] * 3
    assert count_calls(slurm) == 1
    (slurm / "queue").write_text("")
    assert cached_squeue(snapshot, 0) == "" == cached_squeue(snapshot, 20)
    assert count_calls(slurm) == 2
    (slurm / "queue").unlink()
    assert cached_squeue(snapshot, 0) is None
    assert cached_squeue(snapshot, 20) is None and count_calls(slurm) == 3, "a failure counts for a while"


def test_an_added_row_stays_until_the_next_query(slurm: Path) -> None:
    snapshot = str(slurm / "snapshot")
    cached_squeue(snapshot)
    file = open_snapshot(snapshot)
    add_row(file, "0|CLAIMED||shardmake-code-1")
    os.close(file)
    assert cached_squeue(snapshot) == f"{ROWS}0|CLAIMED||shardmake-code-1\n"
    assert cached_squeue(snapshot, 0) == ROWS


def test_an_incomplete_snapshot_and_a_full_disk_hide_no_answer(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (slurm / "snapshot").write_text("7|PENDING|(None)|shardm")
    assert cached_squeue(str(slurm / "snapshot"), 20) == ROWS
    (slurm / "snapshot").unlink()
    monkeypatch.setattr(watcher.os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert cached_squeue(str(slurm / "snapshot")) == ROWS
    (slurm / "timeout").symlink_to("/usr/bin/timeout")
    monkeypatch.setenv("PATH", str(slurm))
    assert cached_squeue(str(slurm / "other")) is None, "a missing squeue is a failed query"


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


def test_many_processes_share_one_query(slurm: Path) -> None:
    """Six processes poll for 1.5 seconds, twenty times a second each; squeue runs at most twice."""
    snapshot = str(slurm / "snapshot")
    cached_squeue(snapshot)
    variables = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    started = time.monotonic()
    drivers = [subprocess.Popen([sys.executable, "-c", POLL, "1.5", snapshot], env=variables) for _ in range(6)]
    assert [driver.wait() for driver in drivers] == [0] * 6
    assert count_calls(slurm) <= 2 + (time.monotonic() - started) / 2


def test_clusters_with_configurations_of_one_name_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in two containers of one machine."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", str(configuration := tmp_path / "slurm.conf"))
    files = [waiting_snapshot()]
    for text in ("SlurmctldHost=a", "SlurmctldHost=b", "SlurmctldHost=a"):
        configuration.write_text(text)
        files.append(waiting_snapshot())
    assert len(set(files)) == 3 and files[1] == files[3]
