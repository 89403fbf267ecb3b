"""A queue of Slurm that a test writes, workers that begin with their ranks, and ranks that are processes."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardmake.launch import worker
from shardmake.launch.rendezvous import Rendezvous
from shardmake.run.attempt import AttemptDir, heartbeat_file
from tests.programs import install_programs
from tests.unit.launch.fake_run import FakeRun
from tests.workflow.checkout import wait_for

RANK = """
import faulthandler, os, signal, sys, time
from pathlib import Path
from shardmake.run.attempt import AttemptDir, write_heartbeat
folder, rank = AttemptDir(Path(sys.argv[1])), int(sys.argv[2])
folder.stacks.mkdir(exist_ok=True)
faulthandler.register(signal.SIGUSR1, file=folder.stack(rank).open("w"))
"""


@contextmanager
def running_ranks(
    number: int, folder: AttemptDir, code: str, *words: str, variables: Mapping[str, str] = os.environ
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Run ``code`` after `RANK` in processes with these words; all have written a heartbeat or ended."""
    command = [sys.executable, "-c", RANK + code, str(folder.root)]
    ranks = [subprocess.Popen([*command, str(rank), *words], env=variables) for rank in range(number)]
    files = [heartbeat_file(folder.heartbeats, rank) for rank in range(number)]
    try:
        wait_for(lambda: all(file.exists() or rank.poll() is not None for file, rank in zip(files, ranks, strict=True)))
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder; squeue prints its file ``queue``, counts its calls in ``calls``, and fails without that file."""
    squeue = f'echo "$@" >> {tmp_path}/calls\ncat {tmp_path}/queue'
    install_programs(tmp_path / "bin", monkeypatch, {"squeue": squeue})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def prepared_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers handle no signals, and begin after the rendezvous and the checks of their nodes."""
    met = Rendezvous(address="10.0.0.1", port=1, interface="ib0", host="c1")
    monkeypatch.setattr(worker, "run_rendezvous", lambda *_: met)
    monkeypatch.setattr(worker, "check_node", lambda *_: None)
    monkeypatch.setattr(worker, "StopRequest", lambda file: SimpleNamespace(signal_name=None))


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> FakeRun:
    caplog.set_level("INFO", "shardmake")
    return FakeRun(tmp_path, monkeypatch)
