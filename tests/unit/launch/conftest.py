"""A queue of Slurm that a test writes."""

from pathlib import Path

import pytest

from tests.programs import install_programs


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder; squeue prints its file ``queue``, counts its calls in ``calls``, and fails without that file."""
    squeue = f'echo "$@" >> {tmp_path}/calls\ncat {tmp_path}/queue'
    install_programs(tmp_path / "bin", monkeypatch, {"squeue": squeue})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path
