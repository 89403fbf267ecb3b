from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmake.run.paths import RunDir
from tests.bucket import bucket, server
from tests.finished_run import DRAWN, make_rundir
from tests.hub import WRITER, FakeHub

__all__ = ["bucket", "server"]


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that was trained, merged and evaluated."""
    monkeypatch.setattr("shardmake.push.bundle.card_plots", lambda *_: DRAWN)
    return make_rundir(tmp_path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub(tmp_path / "hub") as server:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("shardmake.push.bundle.card_plots", lambda *_: DRAWN)
        monkeypatch.setattr("shardmake.core.hub.RETRY_WAITS", (0.0, 0.0, 0.0))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", WRITER)
        yield server
