import sys
from pathlib import Path

import pytest

from shardmake.errors import UserError
from shardmake.rundir import RunDir
from shardmake.train.trackers import check_trackers, tracker_environment


def test_installed_trackers_pass() -> None:
    check_trackers(["tensorboard", "mlflow"])


def test_a_missing_package_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(
        UserError, match=r"report_to names wandb, .* Install it \(pip install wandb\), or take wandb out"
    ):
        check_trackers(["wandb"])


def test_files_lie_in_the_run_and_the_users_own_settings_stand(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "runs/chat")
    mine = {"MLFLOW_TRACKING_URI": "http://lab:5000"}
    found = tracker_environment(rundir, ["tensorboard", "wandb", "mlflow"], offline=True, environment=mine)
    assert found["TENSORBOARD_LOGGING_DIR"] == str(rundir.train / "tensorboard")
    assert found["WANDB_MODE"] == "offline" and "MLFLOW_TRACKING_URI" not in found
    assert tracker_environment(rundir, ["wandb"], offline=False, environment={})["WANDB_MODE"] == "online"
    assert tracker_environment(rundir, "none", offline=False, environment={}) == {}


def test_attempts_of_a_run_share_one_id_and_runs_do_not(tmp_path: Path) -> None:
    def run_id(name: str) -> str:
        return tracker_environment(RunDir(tmp_path / name), ["wandb"], offline=True, environment={})["WANDB_RUN_ID"]

    assert run_id("a") == run_id("a") != run_id("b")
