"""Finished runs of older commits, kept small: they are read whole, stay finished, and are compared and reported."""

import json
import os
import shutil
from pathlib import Path

import pytest

from shardmake.commands.listing import list_runs
from shardmake.commands.status import OPEN, describe, read_states
from shardmake.config.load import load_cluster, load_config
from shardmake.core.atomic import sealed, unsealed
from shardmake.report.comparison import compare
from shardmake.report.stage import write_report
from shardmake.run.attempt import Attempt, AttemptDir
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from shardmake.run.settings_digest import result_settings, settings_digest
from shardmake.run.training_settings import TrainingSettings

FOLDERS = sorted(path for path in (Path(__file__).parents[2] / "older_runs").iterdir() if path.is_dir())


@pytest.fixture(params=FOLDERS, ids=lambda path: path.name)
def older(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """The folder of a finished run, without its weights and examples, beside its configuration."""
    shutil.copytree(request.param, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    rundir = RunDir(tmp_path / "runs/done")
    for name, entry in json.loads(rundir.model_receipt.read_text())["verification"]["files"].items():
        (rundir.model / name).touch()
        os.truncate(rundir.model / name, entry["size"])
    return rundir


def test_an_older_run_is_read_whole_and_nothing_of_it_runs_again(older: RunDir) -> None:
    config = load_config(Path("runs.yaml"))
    cluster, run = load_cluster(Path(config.cluster)), config.runs["done"]
    (state,) = read_states(config, cluster, older.root.parent)
    assert (state.state, set(state.stages.values())) == ("done", {"done"}), state
    assert "Evaluation loss" in describe(run, cluster, older)
    assert [listed.stage for listed in list_runs(config, cluster, older.root.parent)] == ["done"]
    assert compare({"done": run, "again": run}, cluster, older.root.parent).runs[0].training is not None
    assert "optimizer steps" in write_report(run, older, cluster.profile).read_text()


def test_a_run_that_cannot_be_read_is_one_line_and_leaves_the_others(older: RunDir) -> None:
    shutil.copytree(older.root, older.sibling("broken").root)
    broken = older.sibling("broken")
    broken.train_receipt.write_text(
        json.dumps(sealed(unsealed(json.loads(older.train_receipt.read_text())) | {"format": 9}))
    )
    config = load_config(Path("runs.yaml"))
    both = config.model_copy(update={"runs": {"broken": config.runs["done"], **config.runs}})
    first, second = read_states(both, load_cluster(Path(config.cluster)), older.root.parent)
    assert "receipt.json was made by another version of Shardmake" in first.state and second.state == "done"
    assert OPEN not in second.stages.values()


def test_a_training_of_an_older_commit_is_still_the_same_training(older: RunDir) -> None:
    """An unfinished one then resumes from its checkpoints."""
    attempt = Attempt.read(AttemptDir(older.attempts / "001").settings)
    settings, plan = TrainingSettings.read(older.training), Plan.read(older.plan)
    known = attempt.result_settings
    found = result_settings(settings, plan, known["content of the data"], known["content of the model"])
    assert settings_digest(found, older) == attempt.settings_digest
    assert settings_digest(found | {"learning_rate": "3.0"}, older) != attempt.settings_digest
