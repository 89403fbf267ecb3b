import sys
from pathlib import Path
from typing import Any

import pytest

from shardmake.core.errors import ShardmakeError
from shardmake.run.attempt import Attempt
from shardmake.run.paths import RunDir
from shardmake.train.trackers import check_trackers, tracker_environment
from tests.finished_run import make_attempt


def attempt(root: Path, **changes: Any) -> Attempt:
    return make_attempt(1, RunDir(root), "cpu").model_copy(update=changes)


def test_installed_trackers_pass() -> None:
    check_trackers(["tensorboard", "mlflow"])


def test_a_missing_package_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ShardmakeError, match=r"report_to names wandb, .* Install it \(pip install wandb\), or take wandb out"
    ):
        check_trackers(["wandb"])


def test_a_package_that_does_not_load_is_found_before_the_job_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trackio.py").write_text("import something_that_trackio_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(ShardmakeError, match=r"cannot be used: No module named 'something_that_trackio_needs'"):
        check_trackers(["trackio"])


def test_files_lie_in_the_run_and_the_users_own_settings_stand(tmp_path: Path) -> None:
    mine = {"MLFLOW_TRACKING_URI": "http://lab:5000"}
    found = tracker_environment(attempt(tmp_path), ["tensorboard", "wandb", "mlflow"], mine)
    assert found["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "train/tensorboard")
    assert found["WANDB_MODE"] == "offline" and "MLFLOW_TRACKING_URI" not in found
    assert tracker_environment(attempt(tmp_path, offline=False), ["wandb"], {})["WANDB_MODE"] == "online"
    assert tracker_environment(attempt(tmp_path), "none", {}) == {}


def test_attempts_share_one_id_unless_run_or_settings_differ(tmp_path: Path) -> None:
    def run_id(name: str, **changes: Any) -> str:
        return tracker_environment(attempt(tmp_path / name, **changes), ["wandb"], {})["WANDB_RUN_ID"]

    assert run_id("a") == run_id("a", number=2)
    assert len({run_id("a"), run_id("b"), run_id("a", recipe="other")}) == 3
