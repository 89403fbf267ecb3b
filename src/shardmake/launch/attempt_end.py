"""Collect what an attempt left behind, and add the attempt to the history."""

import time
from pathlib import Path

from shardmake.checkpoint import store
from shardmake.launch import user_script
from shardmake.launch.outcome import Evidence, Outcome, classify
from shardmake.launch.slurm_states import JobStatus
from shardmake.launch.training import Training
from shardmake.run.attempt import AttemptDir, SubmittedJob
from shardmake.run.attempt_history import AttemptRecord, next_fallback
from shardmake.run.plan import Plan

RECORD_SECONDS = 10.0
"""How long the first exit record may take to become visible here after Slurm has reported the job's end."""


def record_attempt(training: Training, job: SubmittedJob, status: JobStatus) -> Outcome:
    """Determine why ``job`` ended, and add its attempt to the history."""
    folder = training.attempt_dir(job.attempt)
    plan = folder.read().plan_digest or training.plan_digest
    _wait_for_exit_records(folder, status)
    is_script = training.run.script is not None
    finished = user_script.finished_outcome(training.rundir, folder, training.settings_digest) if is_script else None
    outcome = finished or classify(_collect_evidence(training, folder, status))
    if not training.run.script:
        store.discard_unfinished(training.rundir.checkpoints)  # on a full disk they block the next save
    record = AttemptRecord(
        attempt=job.attempt,
        job=job.id,
        plan=plan,
        strategy=Plan.read(folder.plan).choice.strategy,
        fallback=next_fallback(training.attempts, plan),
        submitted=job.submitted,
        ended=time.time(),
        end=outcome.end.value,
        message=outcome.message,
        host=outcome.host,
        checkpoint_step=training.progress(),
        failed_step=outcome.error.step if outcome.error else None,
    )
    # An earlier driver may have been killed right after it wrote this record.
    training.save_attempts([*(earlier for earlier in training.attempts if earlier.attempt != job.attempt), record])
    training.rundir.job.unlink(missing_ok=True)
    return outcome


def _collect_evidence(training: Training, folder: AttemptDir, status: JobStatus) -> Evidence:
    return Evidence(
        finished=training.is_finished(),
        stop_file=training.rundir.stop_file.exists(),
        stopped=folder.stopped.exists(),
        slurm_state=status.name,
        exits=folder.exits(),
        errors=folder.rank_errors(),
        nodes=folder.read().nodes,
        hang=folder.read_hang(),
        cancelled_by=status.cancelled_by,
        last_output=_last_line(folder.slurm),
    )


def _wait_for_exit_records(folder: AttemptDir, status: JobStatus) -> None:
    """Give a network file system time to show what the nodes wrote; killed nodes write nothing."""
    deadline = time.monotonic() + RECORD_SECONDS * (status.name in ("COMPLETED", "FAILED"))
    while not folder.exits() and time.monotonic() < deadline:
        time.sleep(0.2)


def _last_line(folder: Path) -> str:
    """Return the last line in the logs that Slurm's step left in ``folder``."""
    logs = sorted(folder.glob("*.out"), key=lambda path: path.stat().st_mtime)
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
