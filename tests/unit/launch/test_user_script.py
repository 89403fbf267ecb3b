"""A user's training script: its validation, its environment variables, and when it counts as finished."""

import json
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from shardmake.config.inputs import check_inputs, check_script
from shardmake.config.models import Run, Strategy
from shardmake.config.script_file import SCRIPT_VARIABLES
from shardmake.core.errors import EngineMismatchError, ShardmakeError
from shardmake.launch import user_script
from shardmake.render.deepspeed_file import with_numbers
from shardmake.render.stage import Files, render_files, write_files
from shardmake.run.attempt import AttemptDir, record_error
from shardmake.run.attempt_history import EndReason
from shardmake.run.engine import Engine
from shardmake.run.paths import RunDir
from shardmake.run.training_settings import ScriptProgram, script_environment
from shardmake.train.user_script import run_script
from tests.finished_run import make_exit, make_record
from tests.unit.launch.fake_run import write_attempt
from tests.unit.plans import make_cluster, make_model, make_plan, make_run, make_training_settings


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    return tmp_path / "train.py"


def rendered(folder: Path, strategy: Strategy, run: Run, **degrees: int) -> Files:
    return render_files(make_plan(strategy, **degrees), run, make_cluster(), make_model(), folder)


def test_a_script_must_exist_and_be_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    check_script("script", tmp_path / "train.py")
    (tmp_path / "train.sh").write_text("#!/bin/bash\nset -e\naccelerate launch train.py\n")
    with pytest.raises(ShardmakeError, match=r"runs.x.script: .*train.sh, line 3 is not Python"):
        check_inputs("x", make_run(script=str(tmp_path / "train.sh")))
    with pytest.raises(ShardmakeError, match=r"runs.x.script: 'nowhere.py' does not exist"):
        check_inputs("x", make_run(script="nowhere.py"))


def test_editing_the_script_changes_the_training_settings(script: Path) -> None:
    run, programs = make_run(script=str(script), script_args=["--lr", "1"]), []
    for text in ("a = 1", "a = 2"):
        script.write_text(text)
        programs.append(rendered(script.parent, "zero2", run).training.program)
    assert [one.args for one in programs] == [["--lr", "1"]] * 2 and programs[0].sha256 != programs[1].sha256


@pytest.mark.parametrize(("strategy", "degrees", "own", "gathers"), [
    ("zero3", {}, True, True), ("zero2", {}, True, None), ("zero2", {"tensor_parallel": 2}, True, True),
    ("zero3", {}, False, False),
])  # fmt: skip
def test_a_script_chooses_its_own_batch_sizes_and_may_gather_its_weights(
    script: Path, strategy: Strategy, degrees: dict[str, int], own: bool, gathers: bool | None
) -> None:
    values = rendered(script.parent, strategy, make_run(script=str(script) if own else None), **degrees).deepspeed
    batch = {values["train_micro_batch_size_per_gpu"], values["gradient_accumulation_steps"]}
    assert (batch == {"auto"}) == own
    assert values["zero_optimization"].get("stage3_gather_16bit_weights_on_model_save") is gathers


def test_a_script_gets_the_deepspeed_file_with_numbers(script: Path) -> None:
    """An "auto" that has no number is left out."""
    folder, native = script.parent, AttemptDir(script.parent).deepspeed_native
    write_files(rendered(folder, "zero3", make_run(script=str(script), max_grad_norm=0.5)), folder, make_model())
    assert "auto" not in native.read_text()
    values = json.loads(native.read_text())
    assert (values["train_micro_batch_size_per_gpu"], values["gradient_accumulation_steps"]) == (2, 2)
    assert (values["gradient_clipping"], values["bf16"]) == (0.5, {"enabled": True})
    assert values["zero_optimization"]["reduce_bucket_size"] == 64 * 64
    write_files(rendered(folder, "zero3", make_run()), folder, make_model())
    assert not native.exists()
    values = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}, "train_batch_size": "auto"}
    numbers = with_numbers(values, {"learning_rate": 0.25, "adam_beta1": 0.9, "adam_beta2": 0.95}, hidden_size=8)
    assert numbers == {"optimizer": {"type": "AdamW", "params": {"lr": 0.25, "betas": [0.9, 0.95]}}}


@pytest.fixture
def folder(tmp_path: Path) -> AttemptDir:
    """Attempt 2 of a run on two nodes."""
    folder = AttemptDir(tmp_path / "runs/lab/train/attempts/002")
    write_attempt(folder, make_plan("zero2"))
    return folder


def prepared(rundir: RunDir) -> RunDir:
    user_script.prepare_folders(rundir, "r", {})
    return rundir


def write_exits(folder: AttemptDir, *codes: int) -> None:
    for rank, code in enumerate(codes):
        make_exit(rank, returncode=code).write(folder.exit_record(rank))


def test_all_variables_are_documented(folder: AttemptDir) -> None:
    training = rendered(folder.root, "zero2", make_run()).training
    values = script_environment(folder, folder.read(), make_plan("zero2"), training)
    page = (Path(__file__).resolve().parents[3] / "docs/how-to/user-script.md").read_text()
    assert [name for name in values if f"`{name}`" not in page] == []
    assert tuple(values) == SCRIPT_VARIABLES
    expected = {"DEEPSPEED_CONFIG": folder.deepspeed_native, "ATTEMPT": 2, "MICRO_BATCH_SIZE": 2, "MAX_STEPS": 10}
    assert {name: values[f"SHARDMAKE_{name}"] for name in expected} == {n: str(one) for n, one in expected.items()}
    assert values["SHARDMAKE_OUTPUT"].endswith("runs/lab/train/output")


def test_status_0_on_all_nodes_and_a_model_write_the_receipt(folder: AttemptDir) -> None:
    rundir = prepared(folder.read().rundir)
    write_exits(folder, 0)
    assert user_script.finished_outcome(rundir, folder, "r") is None
    write_exits(folder, 0, 0)
    empty = user_script.finished_outcome(rundir, folder, "r")
    assert empty is not None and empty.end is EndReason.USER_ERROR and "SHARDMAKE_OUTPUT" in empty.message
    (rundir.script_output / "model.safetensors").touch()
    rundir.metrics.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0, "tokens": 64}\n')
    trained = Engine(api="trainer", engine="deepspeed", zero_stage=2, world_size=3, dtype="float32")
    earlier = AttemptDir(folder.root.parent / "001")
    folder.read().model_copy(update={"number": 1}).write(earlier.settings)
    trained.write(earlier.trained)  # attempt 2 resumed after the last step
    outcome = user_script.finished_outcome(rundir, folder, "r")
    assert outcome is not None and outcome.end is EndReason.FINISHED
    receipt = json.loads(rundir.train_receipt.read_text())
    assert (receipt["steps"], receipt["loss"], receipt["tokens"], receipt["attempts"]) == (2, 2.0, 64, 2)
    assert receipt["checkpoint"] == "train/output"
    assert receipt["world_size"] == 3 and Engine(**receipt["trained"]) == trained
    rundir.train_receipt.unlink()
    assert not user_script.is_finished(rundir, "other")
    assert user_script.is_finished(rundir, "r")
    assert json.loads(rundir.train_receipt.read_text()) == receipt


def test_a_stopped_or_failed_script_has_not_finished(folder: AttemptDir) -> None:
    rundir = prepared(folder.read().rundir)
    assert user_script.newest_file(rundir) == 0
    for second, name in ((100, "checkpoints/a"), (200, "output/b")):
        (rundir.train / name).touch()
        os.utime(rundir.train / name, (second, second))
        assert user_script.newest_file(rundir) == second, "its progress is the time of the newest file"
    (rundir.script_output / "model.safetensors").touch()
    write_exits(folder, 0, 0)
    for what in (lambda: write_exits(folder, 0, 1), folder.stopped.touch, lambda: record_error(folder, 1, OSError())):
        what()
        assert user_script.finished_outcome(rundir, folder, "r") is None
        write_exits(folder, 0, 0)
        folder.stopped.unlink(missing_ok=True)
    assert not user_script.is_finished(rundir, "r")


def test_files_of_other_settings_are_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardmake")
    rundir = RunDir(tmp_path / "lab")
    user_script.prepare_folders(rundir, "old", {})
    (rundir.checkpoints / "step-1").touch()
    user_script.prepare_folders(rundir, "old", {})
    assert caplog.messages == [] and (rundir.checkpoints / "step-1").exists()
    user_script.prepare_folders(rundir, "new", {})
    assert len(caplog.messages) == 2 and not any(rundir.checkpoints.iterdir())
    assert (rundir.train / "checkpoints-of-old/step-1").exists()
    user_script.prepare_folders(rundir, "old", {})
    assert (rundir.checkpoints / "step-1").exists(), "restored"
    user_script.prepare_folders(rundir, "new", {})
    assert (rundir.train / "checkpoints-of-old/step-1").exists()


@pytest.mark.parametrize(("end", "fails"), [("sys.exit(0)", False), ("sys.exit()", False), ("sys.exit(3)", True)])
def test_only_a_status_other_than_0_is_an_error(script: Path, end: str, fails: bool) -> None:
    script.write_text(f"import sys\nassert __name__ == '__main__'\n{end}\n")
    with pytest.raises(SystemExit) if fails else nullcontext():
        run_script(str(script))


@pytest.mark.parametrize("error", [EngineMismatchError("planned float32"), ValueError("a typo"), SystemExit(2)])
def test_an_error_before_the_first_step_is_not_repeated_unchanged(tmp_path: Path, error: BaseException) -> None:
    own = tmp_path / "ds.json"
    own.write_text("{}")
    os.utime(own, (5, 5))
    rundir, folder = RunDir(tmp_path / "x"), AttemptDir(tmp_path / "x/train/attempts/001")
    program = ScriptProgram(path="t.py", args=[f"--deepspeed={own}"], sha256="s")
    make_training_settings().model_copy(update={"program": program}).write(rundir.training)
    write_attempt(folder, make_plan("zero2"), settings_digest="d")
    ended = make_record(end=EndReason.USER_ERROR.value, message="planned float32, found bfloat16")
    again = partial(user_script.refuse_repetition, rundir, [ended])
    record_error(folder, 0, ImportError("no package"))
    again("d", "p")  # may be repaired elsewhere
    record_error(folder, 0, error)
    again("other", "p")
    again("d", "other")
    with pytest.raises(ShardmakeError, match=r"attempt 1 had the same script.*found bfloat16\n.*shardmake retrain x$"):
        again("d", "p")
    rundir.metrics.touch()
    again("d", "p")  # it had trained
    rundir.metrics.unlink()
    os.utime(own, (20, 20))
    again("d", "p")
