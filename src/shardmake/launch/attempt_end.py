"""The end of an attempt: determine why it ended, add it to the history, prepare the next attempt or stop."""

import logging
import time
from dataclasses import replace
from pathlib import Path

from shardmake.checkpoint import store
from shardmake.checkpoint.reshard.convert import Route, route
from shardmake.config.optimizers import DEFAULT_OPTIMIZER
from shardmake.core.errors import DiskFullError, ShardmakeError, StopRequestedError, is_user_error
from shardmake.core.process import wait_until
from shardmake.core.run_folder import read_bytes, unlink
from shardmake.core.units import format_duration
from shardmake.launch import user_script
from shardmake.launch.container import start_failure
from shardmake.launch.error_texts import error_advice
from shardmake.launch.outcome import NODE_FAILURES, Action, Evidence, Outcome, RetryState, classify, decide
from shardmake.launch.resume_validation import confirm_damage
from shardmake.launch.slurm_jobs import lead_seconds
from shardmake.launch.slurm_states import FORGOTTEN, JobStatus
from shardmake.launch.step_output import launcher_error, step_failure, was_cancelled
from shardmake.launch.submission import check_stop_file
from shardmake.launch.training import Training
from shardmake.run.attempt import LOST, AttemptDir, SubmittedJob
from shardmake.run.attempt_history import (
    BY_PERSON,
    AttemptRecord,
    EndReason,
    failed_alike,
    failing_nodes,
    idle_attempts,
    may_rewind,
    next_fallback,
)
from shardmake.run.disk_budget import check_run
from shardmake.run.paths import RunDir, short_path
from shardmake.run.plan import Plan

RECORD_SECONDS = 10.0
"""How long the first exit record may take to become visible here after Slurm has reported the job's end."""
ROOM_SECONDS = 600.0
_IN_PLACE = {
    EndReason.KILLED,
    EndReason.COMMUNICATION,
    EndReason.HANG,
    EndReason.GPU_FAULT,
    EndReason.GPU_OUT_OF_MEMORY,
    EndReason.NON_FINITE,
}
"""Ends after which the same nodes can train on, in the same job."""
_ON_SPARE_NODES = {EndReason.NODE_FAILURE, EndReason.PREFLIGHT, EndReason.RENDEZVOUS}
"""Further ends after which training continues in a job with enough spare nodes."""
_LEADS = 4
"""A job in which training restarts has this many times the seconds left that its last save may take."""
_ROOM_POLL_SECONDS = 5.0
logger = logging.getLogger(__name__)
_SHOWN_LINES = 30
_RUN_AGAIN = "Fix the cause and run the same command again{}."
_ADVICE = {
    EndReason.GPU_OUT_OF_MEMORY: "No fallback is left. Use more nodes, a shorter sequence_length or method: lora.",
    EndReason.HOST_OUT_OF_MEMORY: "Increase memory_gib_per_node, or choose a strategy without offload.",
    EndReason.NON_FINITE: "Lower the learning rate or check the data of that step. The newest checkpoint is from "
    "before that step. With non_finite: rewind the driver resumes from it, which helps after a transient GPU error.",
    EndReason.DISK_FULL: "`shardmake clean` lists removable files. The same command then resumes from the newest "
    "checkpoint.",
    EndReason.PREFLIGHT: "Fix what the check found and run the same command again. Nothing was trained.",
    EndReason.GPU_FAULT: "If the fault follows the run to other nodes, a kernel of the training is the cause: try "
    "attention: eager and loss: plain.",
    EndReason.SETUP: "Correct slurm.container in the cluster file or the image, and run the same command again.",
    EndReason.SERVICE_START: "Correct service.command, or increase service.start_seconds, and run the same command "
    "again.",
    EndReason.HANG: "The folder's stacks/ has the stacks of all ranks. If a step may take longer, increase "
    "hang_seconds in the cluster file.",
}


def record_attempt(training: Training, job: SubmittedJob, status: JobStatus) -> Outcome:
    """Determine why ``job`` ended, and add its attempt to the history."""
    folder = training.attempt_dir(job.attempt)
    plan = folder.read().plan_digest or training.plan_digest
    # An earlier driver may have been killed right after it wrote this record.
    earlier = [record for record in training.attempts if record.attempt != job.attempt]
    # A network file system may need time to show what the nodes wrote; killed nodes write nothing.
    wait_until(folder.exits, RECORD_SECONDS * (status.name in ("COMPLETED", "FAILED")), 0.2)
    is_script = training.run.script is not None
    finished = user_script.finished_outcome(training.rundir, folder, training.settings_digest) if is_script else None
    outcome = finished or classify(_collect_evidence(training, job, status))
    if outcome.end.value in BY_PERSON:
        outcome = replace(outcome, message=_stop_message(training, outcome))
    if not training.run.script:
        store.discard_unfinished(training.rundir.checkpoints)  # on a full disk they block the next save
    record = AttemptRecord(
        attempt=job.attempt,
        job=job.id,
        plan=plan,
        strategy=Plan.read(folder.plan).choice.strategy,
        fallback=next_fallback(earlier, plan),
        submitted=job.submitted,
        ended=time.time(),
        end=outcome.end.value,
        message=outcome.message,
        host=outcome.host,
        checkpoint_step=training.progress(),
        failed_step=outcome.error.step if outcome.error else None,
    )
    training.save_attempts([*earlier, record])
    unlink(training.rundir.job)
    return outcome


def _stop_message(training: Training, outcome: Outcome) -> str:
    """Return where the training stopped on request, and how to resume it. A script's checkpoints have no known step."""
    newest, name = training.newest_checkpoint(), training.rundir.name
    at, resume = (f" at step {newest[0].step}", f" from step {newest[0].step}") if newest else ("", "")
    if outcome.end is EndReason.CANCELLED:
        return f"Training of {name} was cancelled: {outcome.message} Run the same command again to resume{resume}."
    return (
        f"Training of {name} saved and stopped{at}, because somebody created {short_path(training.rundir.stop_file)}. "
        f"Run the same command again to resume{resume}."
    )


def _collect_evidence(training: Training, job: SubmittedJob, status: JobStatus) -> Evidence:
    folder = training.attempt_dir(job.attempt)
    before = (training.attempt_dir(number).slurm for number in range(job.attempt, 0, -1))
    slurm = next((path for path in before if path.is_dir()), folder.slurm)  # of the attempt with which the job began
    output, batch_output = (_output_lines(slurm, f"{job.id}_{task}_log.out") for task in ("*", "0"))
    attempt, exits, errors = folder.read(), folder.exits(), folder.rank_errors()
    hosts, lost = training.jobs.hosts(status.nodes), [node.host for node in exits if node.phase == LOST]
    has_lost = bool(lost)
    if attempt.spare_nodes:
        hosts = attempt.hosts or hosts[: attempt.job_nodes]
        has_lost |= status.name == "CANCELLED" and training.jobs.has_lost_script(job.id)  # the driver cancelled it
    silent = [node.node_rank for node in exits if node.returncode and node.host not in {error.host for error in errors}]
    forgotten_cancel = status.name == FORGOTTEN and was_cancelled(batch_output)
    return Evidence(
        finished=training.is_finished(),
        stop_file=training.rundir.stop_file.exists(),
        stopped=folder.stopped.exists(),
        slurm_state="NODE_FAIL" if has_lost else "CANCELLED" if forgotten_cancel else status.name,
        exits=exits,
        errors=errors,
        nodes=attempt.job_nodes,
        service_nodes=attempt.service_nodes,
        hosts=hosts,
        down_hosts=lost or (training.jobs.down_hosts(hosts) if status.name in NODE_FAILURES else ()),
        damage=confirm_damage(folder),
        hang=folder.read_hang(),
        cancelled_by=status.cancelled_by,
        container=attempt.container,
        start_failure=start_failure(output) if attempt.container else "",
        step_failure=step_failure(batch_output),  # srun's own lines are in the log of its first task
        launcher_errors={
            rank: launcher_error(_lines(folder.log(rank))) for rank in silent if folder.log(rank).exists()
        },
        last_output=next(reversed(output), ""),
    )


def _output_lines(folder: Path, name: str) -> list[str]:
    """Return the lines in the logs ``name`` that Slurm's step left in ``folder``."""
    logs = sorted(folder.glob(name), key=lambda path: path.stat().st_mtime)
    return [line for log in logs for line in _lines(log) if line.strip()]


def apply_decision(training: Training, outcome: Outcome) -> None:
    """Record what the next attempt changes.

    Raises:
        StopRequestedError: a person asked for the stop.
        ShardmakeError: the training stops here.
    """
    if outcome.end.value in BY_PERSON:
        raise StopRequestedError(outcome.message)
    action, fallback = _choose_action(training, outcome)
    logger.info("%s -> %s", outcome.message, action.value)
    if action in (Action.STOP, Action.GIVE_UP):
        folder, idle = training.attempt_dir(training.last_attempt()), idle_attempts(training.attempts)
        resumes = training.attempts[-1].checkpoint_step > 0
        raise ShardmakeError(failure_message(training.rundir.name, folder, outcome, action, idle, resumes=resumes))
    if outcome.end is EndReason.DISK_FULL:
        wait_for_room(training.rundir)
    decided = {
        "next_fallback": fallback,
        "all_memory": action is Action.MORE_MEMORY,
        "excluded": outcome.host if action is Action.EXCLUDE_AND_RESUME else None,
    }
    training.save_attempts([*training.attempts[:-1], training.attempts[-1].model_copy(update=decided)])


def _choose_action(training: Training, outcome: Outcome) -> tuple[Action, int]:
    """Return what follows the ``outcome`` of the last attempt, and the fallback of the next one."""
    current = next_fallback(training.attempts, training.plan_digest)
    fallback = _find_fallback(training, current, outcome.end)
    action = decide(outcome, _retry_state(training, outcome, fallback))
    return action, current if fallback is None or action is not Action.NEXT_FALLBACK else fallback


def restarts_in_place(training: Training, job: SubmittedJob, outcome: Outcome) -> bool:
    """Return whether the next attempt can run in ``job``: enough nodes, with its memory and the time left."""
    action, fallback = _choose_action(training, outcome)
    plan, here = training.plan.at(fallback), Plan.read(training.attempt_dir(job.attempt).plan)
    if here.spare_nodes:
        excluded = outcome.host if action is Action.EXCLUDE_AND_RESUME else None
        left = [host for host in training.healthy_hosts(job) if host != excluded]
        if len(left) < plan.choice.nodes or training.jobs.has_lost_script(job.id):
            return False
    ends = _IN_PLACE | (_ON_SPARE_NODES if here.spare_nodes else set())
    actions = {Action.RESUME, Action.NEXT_FALLBACK} | ({Action.EXCLUDE_AND_RESUME} if here.spare_nodes else set())
    if outcome.end not in ends or action not in actions:
        return False
    wanted, has = plan.resources["train"], here.resources["train"]
    if (plan.choice.nodes, plan.choice.processes_per_node) != (here.choice.nodes, here.choice.processes_per_node):
        return False
    if wanted.cpus > has.cpus or wanted.memory_gib > has.memory_gib:
        return False
    return training.jobs.seconds_left(job.id) >= _LEADS * lead_seconds(training.cluster.slurm, training.rundir.root)


def wait_for_room(rundir: RunDir, seconds: float = ROOM_SECONDS) -> None:
    """Return once the rest of the run fits on the disk; no job holds nodes meanwhile.

    Raises:
        DiskFullError: It does not fit after ``seconds``; the message says how much is missing and what to remove.
        StopRequestedError: Somebody created the stop file.
    """
    deadline, waits = time.monotonic() + seconds, False
    while True:
        check_stop_file(rundir)
        try:
            return check_run(rundir)
        except DiskFullError as error:
            if time.monotonic() > deadline:
                raise
            if not waits:
                logger.warning("%s The driver waits up to %s for room.", error, format_duration(seconds))
            waits = True
        time.sleep(_ROOM_POLL_SECONDS)


def _retry_state(training: Training, outcome: Outcome, fallback: int | None) -> RetryState:
    requested = training.current_plan().resources["train"].memory_gib
    return RetryState(
        idle_attempts=idle_attempts(training.attempts),
        has_fallback=fallback is not None,
        has_other_nodes=training.uses_slurm,
        has_memory=training.uses_slurm and not outcome.error and requested < training.node_memory_gib,
        host_failed_alike=failed_alike(training.attempts),
        failing_nodes=failing_nodes(training.attempts),
        has_progress=training.attempts[-1].checkpoint_step > 0,
        may_rewind=training.run.non_finite == "rewind" and may_rewind(training.attempts),
    )


def _find_fallback(training: Training, current: int, end: EndReason) -> int | None:
    """Return the next fallback that needs less of the memory that ran out and can resume the newest checkpoint."""
    if end not in (EndReason.GPU_OUT_OF_MEMORY, EndReason.HOST_OUT_OF_MEMORY):
        return None
    newest = training.newest_checkpoint()
    is_adam = training.plan.workload.optimizer == DEFAULT_OPTIMIZER  # no other's checkpoints are converted
    for number in training.plan.fallbacks_below(current, host=end is EndReason.HOST_OUT_OF_MEMORY):
        choice = training.plan.at(number).choice
        if newest is None:
            return number
        record, checkpoint = newest
        found = route(record.strategy, record.world_size, choice.strategy, choice.world_size)
        if found is Route.NATIVE or (isinstance(found, Route) and is_adam):
            return number
        logger.info("Skipping fallback %d (%s) for %s: %s.", number, choice.strategy, checkpoint.name, found)
    return None


def failure_message(
    run: str, folder: AttemptDir, outcome: Outcome, action: Action, idle_attempts: int, *, resumes: bool
) -> str:
    """Return the one error that matters, the end of the log or the traceback, and what to do."""
    parts, log = [f"Training of {run} stopped: {outcome.message}"], folder.log(outcome.log)
    if action is Action.GIVE_UP:
        parts.append(f"{idle_attempts} attempts in a row brought no new checkpoint.")
    if outcome.error and not is_user_error(outcome.error.kind):
        parts.append(outcome.error.traceback.rstrip())
    elif outcome.error is None and log.exists() and (log_end := "\n".join(_lines(log)[-_SHOWN_LINES:])):
        parts.append(log_end)
    advice = (outcome.error and error_advice(outcome.error)) or _ADVICE.get(
        outcome.end, _RUN_AGAIN.format("; it resumes from the newest checkpoint" if resumes else "")
    )
    parts.append(f"The output of all ranks is in {short_path(folder.root)}. {advice}")
    return "\n".join(parts)


def _lines(log: Path) -> list[str]:
    return read_bytes(log).decode(errors="replace").splitlines()
