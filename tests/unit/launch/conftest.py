"""A queue of Slurm that a test writes, and workers that begin with their ranks."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from shardmake.launch import worker
from shardmake.launch.rendezvous import Rendezvous
from tests.programs import install_programs
from tests.unit.launch.fake_run import FakeRun


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
