import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from shardmake.config.choices import TRACKERS
from shardmake.core.errors import ShardmakeError
from shardmake.run.attempt import Attempt
from shardmake.run.paths import RunDir
from shardmake.train.trackers import check_trackers, tracker_environment
from tests.finished_run import make_attempt


def attempt(root: Path, **changes: Any) -> Attempt:
    return make_attempt(1, RunDir(root), "cpu").model_copy(update=changes)


def test_the_table_has_every_tracker_of_transformers() -> None:
    check_trackers(["tensorboard", "mlflow"])
    assert set(TRACKERS) == set(INTEGRATION_TO_CALLBACK)


@pytest.mark.parametrize(("name", "words"), [
    ("wandb", r"The tracker wandb in report_to .* \(pip install wandb\), or remove wandb"),
    ("trackio", "cannot be used: No module named 'something_that_trackio_needs'"),
])  # fmt: skip
def test_missing_broken_packages_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    (tmp_path / "trackio.py").write_text("import something_that_trackio_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ShardmakeError, match=words):
        check_trackers([name])


def test_files_are_in_the_run_and_user_settings_are_kept(tmp_path: Path) -> None:
    own = {"MLFLOW_TRACKING_URI": "http://lab:5000"}
    found = tracker_environment(attempt(tmp_path), ["tensorboard", "wandb", "mlflow"], own)
    assert found["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "train/tensorboard")
    assert found["WANDB_MODE"] == "offline" and "MLFLOW_TRACKING_URI" not in found
    assert tracker_environment(attempt(tmp_path, offline=False), ["wandb"], {})["WANDB_MODE"] == "online"
    assert tracker_environment(attempt(tmp_path), "none", {}) == {}


def test_attempts_share_one_id_per_run_and_settings(tmp_path: Path) -> None:
    def run_id(name: str, **changes: Any) -> str:
        return tracker_environment(attempt(tmp_path / name, **changes), ["wandb"], {})["WANDB_RUN_ID"]

    assert run_id("a") == run_id("a", number=2)
    assert len({run_id("a"), run_id("b"), run_id("a", settings_digest="other")}) == 3
