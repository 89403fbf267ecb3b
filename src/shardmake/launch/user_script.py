"""Track a user's training script: its folders, its progress, and whether it has finished.

Shardmake cannot read the script's checkpoints, so the script resumes by itself (docs/how-to/user-script.md). It has
finished when the ranks of every node ended with status 0 and did not stop on request.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field

from shardmake.checkpoint.training_receipt import write_script_receipt
from shardmake.core.errors import EngineMismatchError, ShardmakeError
from shardmake.core.run_folder import make_folder, unlink
from shardmake.launch.outcome import Outcome
from shardmake.run.attempt import AttemptDir
from shardmake.run.attempt_history import AttemptRecord, EndReason
from shardmake.run.paths import RunDir
from shardmake.run.record import RunFile
from shardmake.run.settings_digest import describe_changes, stash_and_restore
from shardmake.run.training_settings import ScriptProgram, TrainingSettings

_SAME_AGAIN = {EngineMismatchError.__name__, "SystemExit"} | {
    kind.__name__
    for kind in (AssertionError, AttributeError, IndexError, KeyError, NameError, SyntaxError, TypeError, ValueError)
}
"""Errors that the same script and arguments raise again. Others may be repaired elsewhere: a package, a file."""


class ScriptState(RunFile):
    """``train/script.json``: the settings that the script's checkpoints and output belong to."""

    settings_digest: str = Field(description="Digest of the settings and of the script that made them.")
    finished_by: int | None = Field(description="Attempt that finished; None if none has.")


def prepare_folders(rundir: RunDir, settings_digest: str, settings: Mapping[str, str]) -> None:
    """Create the script's folders, and set aside what another script or other settings left in them."""
    before = ScriptState.read_if_exists(_state(rundir))
    if before and before.settings_digest != settings_digest:
        theirs = before.settings_digest
        changes = describe_changes(rundir, theirs, settings)
        for folder in filter(Path.exists, (rundir.checkpoints, rundir.script_output)):
            stash_and_restore(folder, theirs, settings_digest, changes)
        unlink(rundir.metrics)
    for folder in (rundir.checkpoints, rundir.script_output):
        make_folder(folder)
    ScriptState(settings_digest=settings_digest, finished_by=None).write(_state(rundir))


def is_finished(rundir: RunDir, settings_digest: str) -> bool:
    """Return whether an attempt has finished. Write its receipt again if it is missing."""
    state = ScriptState.read_if_exists(_state(rundir))
    if state is None or state.settings_digest != settings_digest or state.finished_by is None:
        return False
    if not rundir.train_receipt.exists():
        write_script_receipt(rundir, state.finished_by, settings_digest)
    return True


def finished_outcome(rundir: RunDir, folder: AttemptDir, settings_digest: str) -> Outcome | None:
    """Write the receipt and return the outcome if the attempt in ``folder`` finished; None if something ended it."""
    attempt, exits = folder.read(), folder.exits()
    ranks = [node for node in exits if node.node_rank < attempt.nodes]
    ended_well = len(ranks) == attempt.nodes and all(node.returncode == 0 for node in ranks)
    if not ended_well or folder.stopped.exists() or folder.rank_errors():
        return None
    if not any(rundir.script_output.iterdir()):
        return Outcome(
            EndReason.USER_ERROR,
            f"The script ended with status 0 but left no model: {rundir.script_output} is empty. Write the model to "
            "the folder in SHARDMAKE_OUTPUT, which script_args can use as well.",
        )
    write_script_receipt(rundir, attempt.number, settings_digest)
    ScriptState(settings_digest=settings_digest, finished_by=attempt.number).write(_state(rundir))
    return Outcome(EndReason.FINISHED, "The script finished.")


def refuse_repetition(rundir: RunDir, history: Sequence[AttemptRecord], settings_digest: str, plan: str) -> None:
    """Raise `ShardmakeError` if the last attempt failed before it left anything, and nothing has changed since.

    A file that the script's arguments name counts as changed if it is newer than that attempt.
    """
    last = history[-1] if history else None
    if last is None or last.end != EndReason.USER_ERROR.value or last.plan != plan:
        return
    if last.checkpoint_step or rundir.metrics.exists():
        return
    folder = AttemptDir(rundir.attempts / f"{last.attempt:03d}")
    program = TrainingSettings.read(rundir.training).program
    if folder.read().settings_digest != settings_digest or not isinstance(program, ScriptProgram):
        return
    files = (Path(word.rpartition("=")[2]) for word in program.args)
    is_newer = any(path.is_file() and path.stat().st_mtime > last.ended for path in files)
    if not is_newer and any(error.kind in _SAME_AGAIN for error in folder.rank_errors()):
        raise ShardmakeError(
            f"Training of {rundir.name} was not started: attempt {last.attempt} had the same script, arguments and "
            f"plan. {last.message}\nChange one of them. After a change that is in none of them, such as an imported "
            f"module: shardmake retrain {rundir.name}"
        )


def newest_file(rundir: RunDir) -> int:
    """Return the Unix time of the newest file in the script's folders, 0 if there is none."""
    files = (path for folder in (rundir.checkpoints, rundir.script_output) for path in folder.rglob("*"))
    return int(max((path.stat().st_mtime for path in files if path.is_file()), default=0))


def _state(rundir: RunDir) -> Path:
    return rundir.train / "script.json"
