"""A script of the user's: what is refused before it is queued, what it is told, and when it counts as finished."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.inputs import check_inputs, check_script
from shardmake.config.models import Cluster
from shardmake.core.errors import ShardmakeError
from shardmake.launch import user_script
from shardmake.launch.jobs import attempt_settings
from shardmake.render.stage import render_files
from shardmake.run.attempt import AttemptDir, NodeExit, record_error
from shardmake.run.attempt_history import EndReason
from shardmake.run.paths import RunDir
from shardmake.run.training_settings import ScriptProgram
from shardmake.train.rank_context import RankContext
from shardmake.train.user_script import run_script, script_environment
from tests.unit.plans import make_cluster, make_model, make_plan, make_run


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"script_args": ["--lr"]}, "script_args need a script"),
        ({"script": "train.py", "engine": "loop"}, "cannot be combined with script"),
        (
            {"script": "train.py", "checkpoints": {"asynchronous": True}},
            "cannot be combined with script, which saves its own",
        ),
        ({"script": "train.py", "script_args": ["--lr", 1]}, "script_args"),
    ],
)
def test_contradictions_in_the_configuration(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_run(**settings)


def test_a_script_must_be_there_and_be_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    check_script("script", tmp_path / "train.py")
    (tmp_path / "train.sh").write_text("#!/bin/bash\nset -e\naccelerate launch train.py\n")
    with pytest.raises(ShardmakeError, match=r"runs.x.script: .*train.sh, line 3 is not Python"):
        check_inputs("x", make_run(script=str(tmp_path / "train.sh")))
    with pytest.raises(ShardmakeError, match=r"runs.x.script: 'nowhere.py' does not exist"):
        check_inputs("x", make_run(script="nowhere.py"))


def test_an_edited_script_is_another_training(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    run = make_run(script=str(script), script_args=["--lr", "1"])
    programs = []
    for text in ("a = 1", "a = 2"):
        script.write_text(text)
        files = render_files(make_plan("zero2"), run, make_cluster(), make_model(), tmp_path)
        programs.append(files.training.program)
    first, second = programs
    assert isinstance(first, ScriptProgram) and isinstance(second, ScriptProgram)
    assert first.args == second.args == ["--lr", "1"]
    assert first.sha256 != second.sha256


def test_batches_of_a_script_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    run = make_run(script=str(tmp_path / "train.py"))
    values = render_files(make_plan("zero2"), run, make_cluster(), make_model(), tmp_path).deepspeed
    assert values["train_micro_batch_size_per_gpu"] == values["gradient_accumulation_steps"] == "auto"
    assert values["zero_optimization"]["stage"] == 2


@pytest.fixture
def folder(tmp_path: Path) -> AttemptDir:
    """Attempt 2 of a run on two nodes."""
    folder = AttemptDir(tmp_path / "runs/lab/train/attempts/002")
    plan, cluster = make_plan("zero2"), make_cluster()
    settings = attempt_settings(2, tmp_path / "runs/lab", cluster, plan, resume_from=None, recipe="r")
    settings.write(folder.settings)
    plan.write(folder.plan)
    return folder


def leave(folder: AttemptDir, *codes: int) -> None:
    for rank, code in enumerate(codes):
        record = NodeExit(
            node_rank=rank, host="n", started=1.0, ended=9.0, phase="training", returncode=code, stop_signal=None
        )
        record.write(folder.exit_record(rank))


def test_documented_variables_are_set(folder: AttemptDir) -> None:
    plan, cluster = make_plan("zero2"), Cluster(**make_cluster().model_dump())
    training = render_files(plan, make_run(), cluster, make_model(), folder.root).training
    values = script_environment(RankContext(folder, folder.read(), plan, training, rank=0))
    page = (Path(__file__).resolve().parents[3] / "docs/how-to/user-script.md").read_text()
    assert [name for name in values if f"`{name}`" not in page] == []
    assert values["SHARDMAKE_ATTEMPT"] == "2"
    assert values["SHARDMAKE_MICRO_BATCH_SIZE"] == "2"
    assert values["SHARDMAKE_OUTPUT"].endswith("runs/lab/train/output")
    assert values["SHARDMAKE_MAX_STEPS"] == "10"


def test_status_0_everywhere_and_a_model_make_a_receipt(folder: AttemptDir) -> None:
    rundir = folder.read().rundir
    user_script.make_room(rundir, "r", print)
    leave(folder, 0)
    assert user_script.judge(rundir, folder, "r") is None
    leave(folder, 0, 0)
    empty = user_script.judge(rundir, folder, "r")
    assert empty is not None and empty.end is EndReason.USER_ERROR and "SHARDMAKE_OUTPUT" in empty.sentence
    (rundir.script_output / "model.safetensors").touch()
    rundir.metrics.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0, "tokens": 64}\n')
    judged = user_script.judge(rundir, folder, "r")
    assert judged is not None and judged.end is EndReason.FINISHED
    receipt = json.loads(rundir.train_receipt.read_text())
    assert (receipt["steps"], receipt["loss"], receipt["tokens"], receipt["attempts"]) == (2, 2.0, 64, 2)
    assert receipt["checkpoint"] == "train/output"
    rundir.train_receipt.unlink()
    assert not user_script.is_finished(rundir, "other")
    assert user_script.is_finished(rundir, "r")
    assert json.loads(rundir.train_receipt.read_text()) == receipt


def test_who_stopped_or_failed_has_not_finished(folder: AttemptDir) -> None:
    rundir = folder.read().rundir
    user_script.make_room(rundir, "r", print)
    (rundir.script_output / "model.safetensors").touch()
    leave(folder, 0, 1)
    assert user_script.judge(rundir, folder, "r") is None
    leave(folder, 0, 0)
    folder.stopped.touch()
    assert user_script.judge(rundir, folder, "r") is None
    folder.stopped.unlink()
    record_error(folder, 1, RuntimeError("a cosmic ray"))
    assert user_script.judge(rundir, folder, "r") is None
    assert not user_script.is_finished(rundir, "r")


def test_what_other_settings_left_is_set_aside(tmp_path: Path) -> None:
    rundir, told = RunDir(tmp_path / "lab"), list[str]()
    user_script.make_room(rundir, "old", told.append)
    (rundir.checkpoints / "step-1").touch()
    user_script.make_room(rundir, "old", told.append)
    assert told == [] and (rundir.checkpoints / "step-1").exists()
    user_script.make_room(rundir, "new", told.append)
    assert len(told) == 2 and not any(rundir.checkpoints.iterdir())
    assert (rundir.train / "checkpoints-of-old/step-1").exists()
    user_script.make_room(rundir, "old", print)
    assert (rundir.checkpoints / "step-1").exists(), "taken back"
    user_script.make_room(rundir, "new", print)
    assert (rundir.train / "checkpoints-of-old/step-1").exists()


def test_progress_is_what_the_script_leaves(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "lab")
    user_script.make_room(rundir, "r", print)
    assert user_script.newest_file(rundir) == 0
    for second, name in ((100, "checkpoints/a"), (200, "output/b")):
        (rundir.train / name).touch()
        os.utime(rundir.train / name, (second, second))
        assert user_script.newest_file(rundir) == second


@pytest.mark.parametrize(("end", "fails"), [("sys.exit(0)", False), ("sys.exit()", False), ("sys.exit(3)", True)])
def test_only_a_status_other_than_0_is_an_error(tmp_path: Path, end: str, fails: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import sys\nassert __name__ == '__main__'\n{end}\n")
    if fails:
        with pytest.raises(SystemExit):
            run_script(str(script))
    else:
        run_script(str(script))
