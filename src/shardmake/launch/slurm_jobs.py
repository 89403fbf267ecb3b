"""Submit, find and query a training job on Slurm, through submitit's batch scripts and Slurm's commands."""

import contextlib
import logging
import math
import os
import pwd
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from shardmake.checkpoint import store
from shardmake.config.models import Cluster, Run, Slurm
from shardmake.config.slurm_options import JobKind
from shardmake.core.atomic import digest
from shardmake.core.errors import SlurmError, TooFewNodesError
from shardmake.core.permissions import private_folder
from shardmake.core.private_names import private
from shardmake.core.run_folder import make_folder
from shardmake.launch.container import JobContainer, JobEnvironment, job_container
from shardmake.launch.jobs import ActiveJob, job_name
from shardmake.launch.slurm_request import SlurmRequest, prepare_submission
from shardmake.launch.slurm_states import (
    FORGOTTEN,
    JobState,
    JobStatus,
    is_no_such_job,
    parse_rows,
    parse_scontrol,
    parse_seconds_left,
)
from shardmake.launch.watcher import cached_squeue
from shardmake.run.attempt import AttemptDir, SubmittedJob
from shardmake.run.attempt_history import load_history
from shardmake.run.attempt_owner import attempt_of_script, claim, last_in_job
from shardmake.run.driver_job import current_driver_dir
from shardmake.run.paths import RunDir, numbered_paths
from shardmake.run.plan import Plan

logger = logging.getLogger(__name__)
TOO_FEW_NODES = re.compile(r"requested node configuration is not available", re.IGNORECASE)
TRANSIENT = re.compile(
    r"timed out|unable to contact slurm|connection (refused|reset)|temporarily|try again|backup controller"
    r"|does not answer|did not answer|zero bytes were transmitted|message (send|receive) failure"
    r"|communication (connection|shutdown) failure|standby mode|SubmitJob|does not take the job",
    re.IGNORECASE,
)
"""Text of sbatch when Slurm does not answer, or has as many jobs of the user as it may, as opposed to a wrong job."""
_EXCLUDED = (
    " Excluded nodes: {nodes}, because they failed before (see the attempts' index.json). Fix these nodes and run the "
    "same command again, which includes them again."
)
_COUNTED = (
    " This limit also counts the driver job. Where it is one job, set slurm.driver: login, and run Snakemake on a "
    "login node."
)
CONTAINER_SIGNAL = "URG"
"""Signal before the time limit of a job in a container.

Slurm sends it to all processes of the job's steps, also to `squashfuse_ll`, which serves the image if Apptainer is
installed without setuid. SIGUSR2 and SIGTERM end that process, and the image's files disappear while the ranks save.
A process that does not handle SIGURG ignores it.
"""
_PAUSES = (5.0, 20.0, 60.0, 180.0)
_QUERY_SECONDS = 60


@dataclass
class SlurmJobs:
    """One Slurm job of N nodes, one task per node."""

    slowest_poll: ClassVar[float] = 20.0
    run_folder: Path
    cluster: Cluster
    run: Run | None = None
    """The run, whose files the job's container must have."""

    def submit(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> str:
        """See `Jobs`. The batch script lies in the attempt's ``slurm`` folder.

        A job of this attempt that Slurm accepted although its sbatch had failed may have started meanwhile. Then the
        attempt belongs to it, and the job of the repeated sbatch is cancelled.
        """
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        def submit() -> str:
            executor = self._executor(folder, plan, excluded)
            make_folder(folder.slurm)
            try:
                return str(private(executor).submit_command(_task_command(executor, folder)).job_id)
            except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
                was_killed = getattr(error.__cause__, "returncode", 0) < 0  # Slurm may have accepted the job before
                if was_killed or TRANSIENT.search(str(error)):
                    is_counted = "SubmitJob" in str(error) and current_driver_dir()
                    raise SlurmError(
                        f"Slurm does not take the job at present: {str(error).strip()}. Run the same command again "
                        f"later. It adopts the job if Slurm has accepted it nevertheless.{_COUNTED * bool(is_counted)}"
                    ) from None
                kind = TooFewNodesError if excluded and TOO_FEW_NODES.search(str(error)) else SlurmError
                nodes = _EXCLUDED.format(nodes=", ".join(excluded)) if excluded else ""
                raise kind(f"Slurm rejected the job: {error}{nodes}") from None

        def find() -> str | None:
            return next((job for job, attempt in self._list_active() if attempt == folder), None)

        job = submit_with_retry(submit, find)
        owner = claim(folder, job)
        if owner != job:
            _cancel_superfluous(job)
        return owner

    def script(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> str:
        """Return the batch script that `submit` would pass to sbatch."""
        executor = self._executor(folder, plan, excluded)
        return str(private(executor).make_submission_file_text(_task_command(executor, folder), "preview"))

    def _executor(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> Any:
        container = job_container(self.cluster, [self.run_folder], [self.run] if self.run else [])
        return make_executor(folder.slurm, training_request(self.run_folder, self.cluster, plan, excluded), container)

    def find(self) -> ActiveJob | None:
        """See `Jobs`. Jobs whose attempt is over or belongs to another job are cancelled."""
        found = None
        newest = max(numbered_paths(RunDir(self.run_folder).attempts), default=0)
        for job, attempt in self._list_active():
            number = int(attempt.root.name) if attempt else newest
            if attempt and attempt.root.exists() and (number < newest or claim(attempt, job) != job):
                _cancel_superfluous(job)
            else:
                found = ActiveJob(job, number)
        return found

    def _list_active(self) -> list[tuple[str, AttemptDir | None]]:
        """Return the queued and running jobs of the run with their attempts."""
        question, name = f"check whether {self.run_folder.name} has a job", job_name(self.run_folder)
        return [
            (job, attempt and last_in_job(attempt, job))
            for job, status in list_jobs(question, "--me", f"--name={name}").items()
            if status.state is not JobState.ENDED
            for attempt in [attempt_of_script(Path(status.script))]
        ]

    def status(self, job: str) -> JobStatus:
        """Query squeue, then scontrol, then sacct: each forgets jobs after its own time, and sacct may not exist.

        Slurm reuses the ids of forgotten jobs, so a job of another name does not count.
        """
        found = self._query(job)
        if found.job_name and found.job_name != job_name(self.run_folder):
            return JobStatus(JobState.GONE, FORGOTTEN)
        return self._resolve_end(job, found) if found.state is JobState.ENDED else found

    def _resolve_end(self, job: str, found: JobStatus) -> JobStatus:
        """Return PREEMPTED if the job was preempted, else add the user who cancelled it if Slurm has the name."""
        control = run_slurm("scontrol", "show", "job", job)
        if control.returncode == 0:
            found = replace(parse_scontrol(control.stdout), cancelled_by=found.cancelled_by)
        if found.name != "CANCELLED":
            return found
        uid = found.cancelled_by or self._query_accounting(job).cancelled_by
        return replace(found, cancelled_by=_user(uid)) if uid else found

    def _query(self, job: str) -> JobStatus:
        queue = cached_squeue(str(_snapshot("queue")))
        if queue is None:
            return JobStatus(JobState.UNKNOWN)
        if found := parse_rows(queue).get(job):
            return found
        control = run_slurm("scontrol", "show", "job", job)
        if control.returncode == 0:
            return parse_scontrol(control.stdout)
        accounted = self._query_accounting(job)
        if is_no_such_job(control.stderr):  # accounting that reports the job as running has missed its end
            return accounted if accounted.state is JobState.ENDED else JobStatus(JobState.GONE, FORGOTTEN)
        return accounted

    def _query_accounting(self, job: str) -> JobStatus:
        answer = run_slurm("sacct", "-X", "-n", "-P", f"--jobs={job}", "--format=JobIDRaw,State,NodeList,JobName")
        return parse_rows(answer.stdout).get(job, JobStatus(JobState.UNKNOWN))

    def seconds_left(self, job: str) -> float:
        """See `Jobs`."""
        return parse_seconds_left(run_slurm("scontrol", "show", "job", job).stdout, datetime.now())

    def hosts(self, nodes: str) -> list[str]:
        """See `Jobs`."""
        assigned = nodes and not nodes.startswith(("(", "None"))
        return run_slurm("scontrol", "show", "hostnames", nodes).stdout.split() if assigned else []

    def down_hosts(self, hosts: Sequence[str]) -> list[str]:
        """See `Jobs`."""
        if not hosts:
            return []
        nodes = run_slurm("sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N|%T").stdout
        states = dict(line.split("|") for line in nodes.split())
        return [host for host in hosts if re.match(r"down|fail|.*\*$", states.get(host, ""))]

    def has_lost_script(self, job: str) -> bool:
        """See `Jobs`."""
        shown = run_slurm("scontrol", "show", "job", job).stdout
        script, nodes = (re.search(rf"^ *{name}=(\S+)", shown, re.MULTILINE) for name in ("BatchHost", "NodeList"))
        return script is not None and nodes is not None and script[1] not in self.hosts(nodes[1])

    def cancel_command(self, job: str) -> str:
        """See `Jobs`."""
        return f"scancel {job}"


def job_owners(run_folder: Path) -> dict[str, str]:
    """Return the users, by job id, of every queued or running job of the run.

    Raises:
        SlurmError: Slurm does not answer, or hides the jobs of others (`PrivateData=jobs`), and the job that another
            user recorded has neither an exit record of each of its nodes, nor an end that the user's driver recorded.
    """
    question = f"check whether another member trains {run_folder.name}"
    listed = {job: status.user for job, status in list_jobs(question, f"--name={job_name(run_folder)}").items()}
    rundir = RunDir(run_folder)
    job = SubmittedJob.read_if_exists(rundir.job)
    if listed or job is None or (uid := rundir.job.stat().st_uid) == os.getuid() or not hides_jobs():
        return listed
    attempt = AttemptDir(rundir.attempts / f"{job.attempt:03d}")
    is_recorded = any(record.job == job.id for record in load_history(rundir.attempt_history))
    if not is_recorded and attempt.count_exits() < attempt.read().job_nodes:
        owner = _user(str(uid)).removeprefix("user ")
        raise SlurmError(
            f"Job {job.id} of {owner} may still train run {run_folder.name}: not all of its nodes have left a record "
            "of their end, and Slurm shows nobody the jobs of others (PrivateData). Wait for its end. If it ended "
            f"without these records, let {owner} run the same command, which records the end and resumes."
        )
    return {}


def hides_jobs() -> bool:
    """Return whether Slurm hides the jobs of others from this user; raise `SlurmError` if it does not answer."""
    answer = run_slurm("scontrol", "show", "config")
    if answer.returncode != 0:
        raise SlurmError(
            f"Cannot check whether Slurm shows the jobs of others: scontrol does not answer ({answer.stderr.strip()}). "
            "Run the same command again once it works."
        )
    is_private = re.search(r"^PrivateData\s*=.*\bjobs\b", answer.stdout, re.MULTILINE) is not None
    return is_private and not _is_operator(answer.stdout)


def _is_operator(config: str) -> bool:
    """Return whether this user, by Slurm's ``config`` and accounting, sees what PrivateData hides from others."""
    admins = ["0", *re.findall(r"^SlurmUser\s*=.*\((\d+)\)", config, re.MULTILINE)]
    me = _user(str(os.getuid())).removeprefix("user ")
    asked = ("sacctmgr", "--noheader", "--parsable2", "show", "user", me, "format=AdminLevel")
    return str(os.getuid()) in admins or run_slurm(*asked).stdout.strip() in ("Operator", "Administrator")


def list_jobs(purpose: str, *options: str, columns: str = "%i|%T|%R|%j|%S|%u|%o") -> dict[str, JobStatus]:
    """Return the jobs that squeue lists with ``options``, by id; ``columns`` are those of `parse_rows`.

    Raises:
        SlurmError: Slurm does not answer; the message names the ``purpose``, such as `list the jobs`.
    """
    answer = run_slurm("squeue", "--noheader", "--all", *options, f"--format={columns}")
    if answer.returncode != 0:
        raise SlurmError(
            f"Cannot {purpose}: Slurm does not answer ({answer.stderr.strip()}). Run the same command again once "
            "squeue works."
        )
    return parse_rows(answer.stdout)


def submit_with_retry(
    submit: Callable[[], str], find: Callable[[], str | None], pauses: Sequence[float] = _PAUSES
) -> str:
    """Return the id of the job that ``submit`` submits; wait for each of ``pauses`` (seconds) after transient errors.

    Slurm may have accepted the job despite the error. So ``find`` looks for the job after each pause, also after the
    last one, and nothing is submitted while ``find`` has no answer: two jobs would write to one run.

    Raises:
        SlurmError: Slurm rejects the job, or still does not answer after the last pause.
    """
    trouble: SlurmError | None = None
    for pause in pauses:
        try:
            return (trouble and find()) or submit()
        except SlurmError as error:
            trouble = error
            if not TRANSIENT.search(str(error)):
                raise
            logger.info("Slurm does not take the job at present. The driver looks for it in %g s.", pause)
            time.sleep(pause)
    assert trouble
    if job := find():
        return job
    raise trouble


def _cancel_superfluous(job: str) -> None:
    logger.info("Cancelling job %s: its attempt is over, or belongs to another job because sbatch was repeated.", job)
    run_slurm("scancel", job)


def _task_command(executor: Any, folder: AttemptDir) -> str:
    return f"{executor.python} -u -m shardmake.launch.slurm_task {shlex.quote(str(folder.root))}"


def make_executor(folder: Path, request: SlurmRequest, container: JobContainer | JobEnvironment | None) -> Any:
    """Return submitit's executor, whose batch script and pickles are in ``folder``, for jobs in ``container``."""
    import submitit

    prepare_submission(request.cluster, os.environ)

    class SlurmExecutor(submitit.SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            """Let a machine without srun show the script, as in a dry run."""
            return 1

    parameters = request.submitit()
    executor = SlurmExecutor(folder=folder, python=shlex.join(container.python) if container else None)
    parameters["srun_args"] += [*container.srun_options] if container else []
    executor.update_parameters(**parameters)
    private(executor).get_job_id_from_submission_command = submitted_job
    return executor


def submitted_job(answer: str | bytes) -> str:
    """Return the job that sbatch says it submitted; a site's own sbatch may print other lines with numbers of jobs.

    Raises:
        SlurmError: It does not say so.
    """
    text = answer if isinstance(answer, str) else answer.decode()
    if found := re.findall(r"Submitted batch job (\d+)", text):
        return str(found[-1])
    raise SlurmError(
        f"sbatch did not answer with 'Submitted batch job N' but {text.strip()!r}. Run the same command again once "
        "squeue works."
    )


def training_request(run_folder: Path, cluster: Cluster, plan: Plan, excluded: list[str]) -> SlurmRequest:
    """Return the request of the training job of ``plan``."""
    resources, choice = plan.resources["train"], plan.choice
    return SlurmRequest(
        cluster,
        JobKind.TRAINING,
        cluster.slurm.time_limit_minutes,
        nodes=plan.job_nodes,
        cpus=resources.cpus,
        memory_mib=1024 * resources.memory_gib,
        gpus=choice.processes_per_node,
        lead=lead_seconds(cluster.slurm, run_folder),
        signal=CONTAINER_SIGNAL if cluster.slurm.container else "",
        name=job_name(run_folder),
        comment=f"shardmake {run_folder.name}: {choice.strategy}",
        excluded=excluded,
    )


def lead_seconds(slurm: Slurm, run_folder: Path) -> int:
    """Return how long before the time limit the job is asked to save: twice the slowest save plus a minute.

    The extra minute is there because Slurm may send the signal that much early. The lead is at least
    ``signal_seconds``, which also serves before the first checkpoint. It is at most a quarter of the limit, so that a
    short job trains at all.
    """
    saves = [record.save_seconds for record, _ in store.committed(RunDir(run_folder).checkpoints)]
    measured = math.ceil(2 * max(saves) + 60) if saves else 0
    return max(1, min(max(slurm.signal_seconds, measured), slurm.time_limit_minutes * 60 // 4))


def _user(uid: str) -> str:
    """Return ``user NAME`` for the ``1000`` of ``CANCELLED by 1000``."""
    with contextlib.suppress(ValueError, KeyError):
        return f"user {pwd.getpwuid(int(uid)).pw_name}"
    return f"user {uid}"


def run_slurm(*command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a query command of Slurm; return status 127 if it is missing, cannot start or does not answer.

    With SLURM_CLUSTERS, some versions print a line with the name of the cluster, which is left out.
    """
    try:
        answer = subprocess.run(
            command, input=stdin, capture_output=True, text=True, errors="replace", timeout=_QUERY_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))
    answer.stdout = re.sub(r"^CLUSTER: .*\n", "", answer.stdout, flags=re.MULTILINE)
    return answer


def waiting_snapshot() -> Path:
    """Return the file in which waiting drivers share squeue's answer and claim slots."""
    return _snapshot("waiting")


def _snapshot(name: str) -> Path:
    """Return a file in a private folder of the user on this machine; each cluster has its own.

    It is not below XDG_RUNTIME_DIR, which disappears at logout while drivers in tmux continue. Clusters differ in
    Slurm's configuration, also where containers of one machine keep it under one name.
    """
    folder = private_folder(Path(tempfile.gettempdir()) / f"shardmake-queue-{os.getuid()}")
    cluster = {variable: os.environ.get(variable) for variable in ("SLURM_CONF", "SLURM_CLUSTERS")}
    with contextlib.suppress(OSError):  # a cluster without files of configuration on its nodes
        cluster["content"] = Path(cluster["SLURM_CONF"] or "/etc/slurm/slurm.conf").read_text(errors="replace")
    return folder / f"{name}-{digest(cluster)}"
