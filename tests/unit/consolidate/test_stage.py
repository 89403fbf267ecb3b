"""The consolidate stage finds the base model."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from shardmake.consolidate.stage import base_folder
from tests.finished_run import make_run

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_base_folder_in_the_config(tmp_path: Path) -> None:
    assert base_folder(make_run(model=str(tmp_path))) == tmp_path


def test_base_folder_of_a_downloaded_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--lab--base" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--lab--base" / "refs").mkdir()
    (tmp_path / "models--lab--base" / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert base_folder(make_run(model="lab/base")) == snapshot
    assert base_folder(make_run(model="lab/other")) is None
