"""What the driver knows of a script of the user's: whether it finished, what it left, whether it gets on.

Shardmake cannot look into its checkpoints. It finished where every node's ranks ended with status 0 and nobody said
that they only stopped; resuming is its own affair (docs/how-to/user-script.md).
"""

from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from shardmake.core.atomic import write_json
from shardmake.core.environment import library_versions
from shardmake.launch.outcome import Outcome
from shardmake.run import set_aside
from shardmake.run.attempt import AttemptDir
from shardmake.run.attempt_history import EndReason
from shardmake.run.metrics import parse_metrics
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from shardmake.run.record import RunRecord

Tell = Callable[[str], None]


class ScriptState(RunRecord):
    """``train/script.json``: whose checkpoints and output those are."""

    recipe: str = Field(description="Digest of the settings and of the script that made them.")
    finished_by: int | None = Field(description="Attempt that finished; None while none has.")


def make_room(rundir: RunDir, recipe: str, tell: Tell) -> None:
    """Create the folders that the script is told of; what another script or other settings left is set aside."""
    before = _read(rundir)
    if before and before.recipe != recipe:
        _set_aside(rundir, before.recipe, recipe, tell)
    for folder in (rundir.checkpoints, rundir.script_output):
        folder.mkdir(parents=True, exist_ok=True)
    ScriptState(recipe=recipe, finished_by=None).write(_state(rundir))


def is_finished(rundir: RunDir, recipe: str) -> bool:
    """Whether an attempt has finished; its receipt is made again if it was lost."""
    state = _read(rundir)
    if state is None or state.recipe != recipe or state.finished_by is None:
        return False
    if not rundir.train_receipt.exists():
        _write_receipt(rundir, state)
    return True


def judge(rundir: RunDir, folder: AttemptDir, recipe: str) -> Outcome | None:
    """Whether the attempt in ``folder`` finished, with the receipt written; None where something else ended it."""
    attempt, exits = folder.read(), folder.exits()
    ended_well = len(exits) == attempt.nodes and all(node.returncode == 0 for node in exits)
    if not ended_well or folder.stopped.exists() or folder.rank_errors():
        return None
    if not any(rundir.script_output.iterdir()):
        return Outcome(
            EndReason.USER_ERROR,
            f"The script ended with status 0 and left no model: {rundir.script_output} is empty. Have it write there; "
            "the folder is in SHARDMAKE_OUTPUT, also in script_args.",
        )
    state = ScriptState(recipe=recipe, finished_by=attempt.number)
    _write_receipt(rundir, state)
    state.write(_state(rundir))
    return Outcome(EndReason.FINISHED, "The script finished.")


def newest_file(rundir: RunDir) -> int:
    """When the script last wrote something that stays, in Unix seconds; 0 if it has not. It grows as it gets on."""
    files = (path for folder in (rundir.checkpoints, rundir.script_output) for path in folder.rglob("*"))
    return int(max((path.stat().st_mtime for path in files if path.is_file()), default=0))


def _state(rundir: RunDir) -> Path:
    return rundir.train / "script.json"


def _read(rundir: RunDir) -> ScriptState | None:
    path = _state(rundir)
    return ScriptState.model_validate_json(path.read_text()) if path.exists() else None


def _set_aside(rundir: RunDir, theirs: str, ours: str, tell: Tell) -> None:
    for folder in (rundir.checkpoints, rundir.script_output):
        if folder.exists():
            set_aside.stash_and_restore(folder, theirs, ours, tell)
    rundir.metrics.unlink(missing_ok=True)


def _write_receipt(rundir: RunDir, state: ScriptState) -> None:
    """Write the training receipt from the last attempt and, if the script wrote any, its metrics."""
    folder = AttemptDir(rundir.attempts / f"{state.finished_by:03d}")
    plan = Plan.read(folder.plan)
    text = rundir.metrics.read_text(errors="replace") if rundir.metrics.exists() else ""
    last = {key: value for line in parse_metrics(text) for key, value in line.items()}
    write_json(
        rundir.train_receipt,
        {
            "steps": last.get("step"),
            "tokens": last.get("tokens"),
            "loss": last.get("loss"),
            "checkpoint": str(rundir.script_output.relative_to(rundir.root)),
            "strategy": plan.choice.strategy,
            "world_size": plan.choice.world_size,
            "recipe": state.recipe,
            "attempts": state.finished_by,
            "versions": library_versions(),
            "finished_at": max(node.ended for node in folder.exits()),
        },
    )
