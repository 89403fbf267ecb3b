from pathlib import Path

import pytest

from shardmake.run.paths import RunDir
from tests.finished_run import make_rundir


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    """A run that was trained, merged and evaluated."""
    return make_rundir(tmp_path)
