"""Submit, find and watch a training job: on Slurm through submitit (imported only here), or as a local process."""

import contextlib
import math
import os
import pwd
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import psutil

from shardmake.checkpoint import store
from shardmake.config.models import Cluster, Slurm
from shardmake.core.atomic import digest
from shardmake.core.environment import library_versions
from shardmake.core.errors import ShardmakeError
from shardmake.launch.low_memory_wait import PREFIX
from shardmake.launch.slurm_states import (
    PREEMPTION_ALIASES,
    JobState,
    JobStatus,
    is_no_such_job,
    parse_rows,
    parse_scontrol,
)
from shardmake.launch.squeue_cache import cached_squeue, run_slurm
from shardmake.run.attempt import Attempt, AttemptDir
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan

_SQUEUE = ("squeue", "--noheader", "--me", "--all", "--format=%i|%T|%R|%j")
_PASSING = re.compile(
    r"timed out|unable to contact slurm|connection (refused|reset)|temporarily|try again|backup controller"
    r"|does not answer",
    re.IGNORECASE,
)
"""What sbatch says where Slurm does not answer for the moment, rather than that it refuses the job."""
_PAUSES = (5.0, 20.0, 60.0, 180.0)


class Jobs(Protocol):
    """What the driver needs of an executor. A job is known by a string id."""

    slowest_poll: ClassVar[float]
    """Seconds between two questions while nothing changes."""

    def submit(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> str:
        """Start the workers of the attempt in ``folder``; return the job's id."""

    def find(self) -> str | None:
        """The id of this run's job if one is queued or running, also if nobody recorded its id."""

    def status(self, job: str) -> JobStatus:
        """Where the job stands."""

    def how_to_cancel(self, job: str) -> str:
        """The command that ends the job."""


def job_name(run_folder: Path) -> str:
    """Name of a run's job: readable, and the same for the same folder whoever asks."""
    return f"{PREFIX}{run_folder.name}-{digest(str(run_folder.resolve()))[:8]}"


@dataclass
class SlurmJobs:
    """One Slurm job of N nodes, one task a node."""

    slowest_poll: ClassVar[float] = 20.0
    run_folder: Path
    cluster: Cluster

    def submit(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> str:
        """See `Jobs`. The batch script lies in the attempt's ``slurm`` folder."""
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        from shardmake.launch.worker import run_slurm_task

        def submit() -> str:
            try:
                return str(self._executor(folder, plan, excluded).submit(run_slurm_task, str(folder.root)).job_id)
            except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
                raise ShardmakeError(f"Slurm refused the job: {error}{_without(excluded)}") from None

        return submit_with_retry(submit, self.find)

    def script(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> str:
        """The batch script that `submit` would hand to sbatch."""
        executor = self._executor(folder, plan, excluded)
        return str(executor._make_submission_file_text(executor._submitit_command_str, "preview"))

    def _executor(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> Any:
        from submitit import SlurmExecutor

        executor = SlurmExecutor(folder=folder.slurm)
        executor.update_parameters(**sbatch_parameters(self.run_folder, self.cluster, plan, excluded))
        return executor

    def find(self) -> str | None:
        """See `Jobs`."""
        answer = run_slurm(*_SQUEUE, f"--name={job_name(self.run_folder)}")
        if answer.returncode != 0:
            raise ShardmakeError(
                f"Slurm does not answer, so a running job cannot be ruled out: {answer.stderr.strip()}"
            )
        alive = [job for job, status in parse_rows(answer.stdout).items() if status.state is not JobState.ENDED]
        return alive[-1] if alive else None

    def status(self, job: str) -> JobStatus:
        """Ask squeue, then scontrol, then sacct: each forgets jobs after its own time, and sacct may not exist.

        Slurm gives the ids of forgotten jobs to new ones; a job of another name is not this one.
        """
        found = self._status(job)
        if found.name and found.name != job_name(self.run_folder):
            return JobStatus(JobState.GONE)
        return self._unmask(job, found) if found.word in PREEMPTION_ALIASES else found

    def _unmask(self, job: str, found: JobStatus) -> JobStatus:
        """Whether it was preempted in truth, and if not, by whom it was cancelled, as far as Slurm tells."""
        control = run_slurm("scontrol", "show", "job", job)
        if control.returncode == 0:
            found = replace(parse_scontrol(control.stdout), by=found.by)
        if found.word != "CANCELLED":
            return found
        by = found.by or self._in_accounting(job).by
        return replace(found, by=_user(by)) if by else found

    def _status(self, job: str) -> JobStatus:
        queue = cached_squeue([*_SQUEUE, "--states=all"])
        if found := parse_rows(queue.stdout).get(job):
            return found
        if queue.returncode != 0:
            return JobStatus(JobState.UNKNOWN)
        control = run_slurm("scontrol", "show", "job", job)
        if control.returncode == 0:
            return parse_scontrol(control.stdout)
        accounted = self._in_accounting(job)
        if is_no_such_job(control.stderr):  # where accounting has it run, it missed the job's end
            return accounted if accounted.state is JobState.ENDED else JobStatus(JobState.GONE)
        return accounted

    def _in_accounting(self, job: str) -> JobStatus:
        """What sacct knows, where there is accounting and it answers."""
        answer = run_slurm("sacct", "-X", "-n", "-P", f"--jobs={job}", "--format=JobIDRaw,State,NodeList,JobName")
        return parse_rows(answer.stdout).get(job, JobStatus(JobState.UNKNOWN))

    def how_to_cancel(self, job: str) -> str:
        """See `Jobs`."""
        return f"scancel {job}"


def job_owners(run_folder: Path) -> dict[str, str]:
    """Users by id of every queued or running job of the run, whoever submitted it."""
    answer = run_slurm("squeue", "--noheader", "--all", f"--name={job_name(run_folder)}", "--format=%i|%u")
    if answer.returncode != 0:
        raise ShardmakeError(
            f"Slurm does not answer, so another member's job cannot be ruled out: {answer.stderr.strip()}"
        )
    return dict(line.split("|") for line in answer.stdout.split())


def submit_with_retry(
    submit: Callable[[], str], find: Callable[[], str | None], pauses: Sequence[float] = _PAUSES
) -> str:
    """The id of the job that ``submit`` submits, again after each of ``pauses`` (seconds) where Slurm is in trouble.

    Slurm may have taken the job all the same, so it is looked for (``find``) before each new try, and there is none
    while that has no answer: two jobs would write to one run.

    Raises:
        ShardmakeError: Slurm refuses the job, or is still in trouble at the end.
    """
    trouble: ShardmakeError | None = None
    for pause in (0.0, *pauses):
        time.sleep(pause)
        try:
            return (trouble and find()) or submit()
        except ShardmakeError as error:
            trouble = error
            if not _PASSING.search(str(error)):
                raise
    assert trouble
    raise trouble


def _without(excluded: Sequence[str]) -> str:
    if not excluded:
        return ""
    return (
        f" Left out were {', '.join(excluded)}, which had failed before; why is in the attempts' index.json. Mend "
        "them and run the same command again: it takes them back."
    )


def sbatch_parameters(run_folder: Path, cluster: Cluster, plan: Plan, excluded: list[str]) -> dict[str, Any]:
    """Submitit's parameters for the training job of ``plan``."""
    slurm, resources, choice = cluster.slurm, plan.resources["train"], plan.choice
    gpus = ":".join(part for part in (slurm.gpu_type, str(choice.processes_per_node)) if part)
    exclude = ",".join([*([slurm.exclude] if slurm.exclude else []), *excluded])
    parameters: dict[str, Any] = {
        "job_name": job_name(run_folder),
        "comment": f"shardmake {run_folder.name}: {choice.strategy}",
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "exclude": exclude or None,
        "time": slurm.time_limit_minutes,
        "nodes": choice.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": resources.cpus,
        "mem": f"{resources.memory_gib}GB",
        "gres": f"gpu:{gpus}" if slurm.gpu_request == "gres" and cluster.accelerator != "cpu" else None,
        "gpus_per_node": gpus if slurm.gpu_request == "gpus-per-node" and cluster.accelerator != "cpu" else None,
        "signal_delay_s": lead_seconds(slurm, run_folder),
        "setup": slurm.setup or None,
        # Slurm 22.05 to 23.02 does not hand --cpus-per-task on to srun; one dead node must end the step.
        "srun_args": [f"--cpus-per-task={resources.cpus}", "--kill-on-bad-exit=1"],
        "additional_parameters": {"no-requeue": True, **slurm.extra},
        "stderr_to_stdout": True,
    }
    # Submitit sends a wckey of its own unless told otherwise, which strict clusters refuse.
    return {name: value for name, value in parameters.items() if value is not None} | {"wckey": slurm.wckey}


def lead_seconds(slurm: Slurm, run_folder: Path) -> int:
    """How long before the time limit the job is told to save: long enough for two of the slowest saves and a minute.

    Slurm may tell it up to a minute earlier. Without a checkpoint so far, and at least, ``signal_seconds``; at most a
    quarter of the limit, so that a short job trains at all.
    """
    saves = [record.save_seconds for record, _ in store.committed(RunDir(run_folder).checkpoints)]
    measured = math.ceil(2 * max(saves) + 60) if saves else 0
    return max(1, min(max(slurm.signal_seconds, measured), slurm.time_limit_minutes * 60 // 4))


def _user(uid: str) -> str:
    """``user NAME`` for the ``1000`` of ``CANCELLED by 1000``."""
    with contextlib.suppress(ValueError, KeyError):
        return f"user {pwd.getpwuid(int(uid)).pw_name}"
    return f"user {uid}"


@dataclass
class LocalJobs:
    """One worker process on this machine, in a session of its own, so that it outlives the driver."""

    slowest_poll: ClassVar[float] = 1.0
    run_folder: Path

    def submit(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> str:
        """See `Jobs`. The id is ``PID@START``: a process id alone may be given to another process."""
        command = [sys.executable, "-m", "shardmake.launch.worker", str(folder.root), "0"]
        with (folder.root / "worker.log").open("w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
        return _process_name(psutil.Process(process.pid))

    def find(self) -> str | None:
        """See `Jobs`."""
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "shardmake.launch.worker" in command and any(
                Path(word).is_relative_to(self.run_folder.resolve()) for word in command
            ):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        return _process_name(process)
        return None

    def status(self, job: str) -> JobStatus:
        """See `Jobs`."""
        pid = int(job.partition("@")[0])
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if _process_name(process) == job:
                if process.status() != psutil.STATUS_ZOMBIE:
                    return JobStatus(JobState.RUNNING)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return JobStatus(JobState.ENDED)

    def how_to_cancel(self, job: str) -> str:
        """See `Jobs`."""
        return f"kill -INT {job.partition('@')[0]}"


def _process_name(process: psutil.Process) -> str:
    """Process id and start in clock ticks since boot, which no adjustment of the clock changes."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(process.pid) from None
    return f"{process.pid}@{fields[19]}"


def make_jobs(run_folder: Path, cluster: Cluster) -> Jobs:
    """The executor that the cluster file asks for."""
    return SlurmJobs(run_folder, cluster) if cluster.executor == "slurm" else LocalJobs(run_folder)


def attempt_settings(number: int, run_folder: Path, cluster: Cluster, plan: Plan, **decided: Any) -> Attempt:
    """The `Attempt` for ``plan`` on ``cluster``; ``decided`` are the driver's own decisions."""
    return Attempt(
        number=number,
        run_folder=str(run_folder.resolve()),
        nodes=plan.choice.nodes,
        processes_per_node=plan.choice.processes_per_node,
        cpus_per_node=plan.resources["train"].cpus,
        accelerator=cluster.accelerator,
        network_interface=cluster.network_interface,
        scratch=cluster.scratch,
        offline=not cluster.internet_on_compute_nodes,
        versions=library_versions(),
        planned_bandwidth=cluster.inter_node_gbps * 1e9 if plan.choice.nodes > 1 else None,
        hang_seconds=cluster.hang_seconds,
        **decided,
    )
