"""Text for the person who reads why a training stopped."""

from pathlib import Path

from shardmake.launch.outcome import Action, Outcome
from shardmake.run.attempt import AttemptDir
from shardmake.run.attempt_history import EndReason

_RUN_AGAIN = "Fix the cause and run the same command again; it resumes from the newest checkpoint."
_ADVICE = {
    EndReason.STOP_REQUESTED: "Run the same command again to resume.",
    EndReason.CANCELLED: "Run the same command again to resume from the newest checkpoint.",
    EndReason.GPU_OUT_OF_MEMORY: "No fallback is left. Use more nodes, a shorter sequence_length or method: lora.",
    EndReason.HOST_OUT_OF_MEMORY: "Increase memory_gib_per_node, or choose a strategy without offload.",
    EndReason.NON_FINITE: "Lower the learning rate or check the data of that step. The newest checkpoint is from "
    "before that step. With non_finite: rewind the driver resumes from it, which helps after a transient GPU error.",
    EndReason.PREFLIGHT: "Fix what the check found and run the same command again. Nothing was trained.",
    EndReason.HANG: "The folder's stacks/ has the stacks of all ranks. If a step may take longer, increase "
    "hang_seconds in the cluster file.",
}


def failure_message(run: str, folder: AttemptDir, outcome: Outcome, action: Action, idle_attempts: int) -> str:
    """Return the one error that matters, the end of the log or the traceback, and what to do."""
    parts = [f"Training of {run} stopped: {outcome.message}"]
    if action is Action.GIVE_UP:
        parts.append(f"{idle_attempts} attempts in a row brought no new checkpoint.")
    if outcome.error:
        parts.append(outcome.error.traceback.rstrip())
    elif log_end := _tail(folder.log(0)):
        parts.append(log_end)
    parts.append(f"The output of all ranks is in {short_path(folder.root)}. {_ADVICE.get(outcome.end, _RUN_AGAIN)}")
    return "\n".join(parts)


def short_path(path: Path) -> str:
    """Return ``path`` relative to the working folder if it lies below it, else absolute."""
    resolved = path.resolve()
    return str(resolved.relative_to(Path.cwd())) if resolved.is_relative_to(Path.cwd()) else str(resolved)


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""
