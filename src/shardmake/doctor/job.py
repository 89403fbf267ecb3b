"""Run the checks of nodes: in one Slurm job, which is submitted like a training, or on this machine."""

import getpass
import logging
import subprocess
import sys
import time
from collections.abc import Callable

from shardmake.checkpoint.record import VISIBLE_SECONDS
from shardmake.config.models import Cluster
from shardmake.config.slurm_options import JobKind
from shardmake.core.environment import library_versions
from shardmake.core.errors import SlurmError
from shardmake.core.log import warn_while_slow
from shardmake.core.process import wait_until
from shardmake.core.units import plural
from shardmake.doctor.node import check_node, run_task
from shardmake.doctor.records import DoctorDir, DoctorRequest, NodeReport
from shardmake.launch.container import job_container
from shardmake.launch.slurm_jobs import list_jobs, make_executor, run_slurm
from shardmake.launch.slurm_request import SlurmRequest
from shardmake.launch.slurm_states import JobState, JobStatus, is_no_such_job
from shardmake.run.findings import Finding, stops

logger = logging.getLogger(__name__)
JOB_NAME = "doctor-shardmake"
"""Start of the job's name. It is not that of a training job, which would count towards trainings_per_user."""
MINUTES = 20
MOST_MEMORY_GIB = 64
CPUS_PER_RANK = 8
"""The job requests less than a training, so that it starts sooner."""
_POLL_SECONDS = 5.0


def make_request(cluster: Cluster, nodes: int, *, build_kernels: bool) -> DoctorRequest:
    """Return what the nodes have to check."""
    environment = None if cluster.slurm.container else cluster.environment or sys.prefix
    return DoctorRequest(
        cluster=cluster, nodes=nodes, versions=library_versions(), environment=environment, build_kernels=build_kernels
    )


def check_nodes(request: DoctorRequest, folder: DoctorDir) -> tuple[list[NodeReport], list[Finding]]:
    """Run the checks, and return the reports of the nodes and findings about nodes without a report."""
    request.write(folder.request)
    folder.shared.mkdir(parents=True, exist_ok=True)
    builds = ", and compiles DeepSpeed's kernels (not with --skip-builds)" if request.build_kernels else ""
    checks = f"checks network, host and GPUs{builds}"
    if request.cluster.executor == "local":
        with warn_while_slow(f"The doctor {checks}", first=30):
            check_node(folder, 0)
        return [NodeReport.read(folder.report(0))], []
    submitted = time.monotonic()
    try:
        job = submit(request, folder)
        logger.info("Submitted job %s to check %s; Ctrl-C cancels it.", job, plural(request.nodes, "node"))
        with warn_while_slow(f"Waiting for job {job}, which {checks}", first=30):
            end = wait_for_job(job, query_job)
    except KeyboardInterrupt:
        # By name, because Slurm may have accepted the job before its id arrived here.
        run_slurm("scancel", f"--user={getpass.getuser()}", f"--name={job_name(folder)}")
        raise
    logger.info("Job %s ended after %.0f s.", job, time.monotonic() - submitted)
    return collect(request, folder, job, end)


def job_name(folder: DoctorDir) -> str:
    """Return the name of the job, which is the only one of this name."""
    return f"{JOB_NAME}-{folder.root.name}"


def submit(request: DoctorRequest, folder: DoctorDir) -> str:
    """Submit the job and return its id."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    container = job_container(request.cluster, [folder.root])
    executor = make_executor(folder.slurm, job_request(request, job_name(folder)), container)
    try:
        return str(executor.submit(run_task, str(folder.root.resolve())).job_id)
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        advice = "Correct the slurm section of the cluster file, or the options of this command."
        raise SlurmError(f"Slurm rejected the job: {error} {advice}") from None


def job_request(request: DoctorRequest, name: str) -> SlurmRequest:
    """Return the request of the job ``name``: that of a training, with less memory and time."""
    cluster = request.cluster
    return SlurmRequest(
        cluster, JobKind.TRAINING, min(MINUTES, cluster.slurm.time_limit_minutes), nodes=request.nodes,
        cpus=min(cluster.cpus_per_node, CPUS_PER_RANK * cluster.processes_per_node),
        memory_mib=1024 * max(1, int(min(MOST_MEMORY_GIB, cluster.memory_gib_per_node))),
        gpus=cluster.processes_per_node, name=name, comment="shardmake doctor --node",
    )  # fmt: skip


def query_job(job: str) -> JobStatus:
    """Return the job's state from squeue; a job that squeue no longer has ended."""
    try:
        found = list_jobs("follow the job", "--states=all", f"--jobs={job}").get(job)
    except SlurmError as error:
        found = None if is_no_such_job(str(error)) else JobStatus(JobState.UNKNOWN)
    return found or JobStatus(JobState.ENDED)


def wait_for_job(job: str, query: Callable[[str], JobStatus], poll_seconds: float = _POLL_SECONDS) -> JobStatus:
    """Wait for the end of the job and return its last state; log why it waits."""
    logged = ""
    while (status := query(job)).state is not JobState.ENDED:
        line = f"Job {job} is {status.name.lower()} {status.nodes}".rstrip()
        if status.name and line != logged:
            logger.info("%s", line)
            logged = line
        time.sleep(poll_seconds)
    return status


def collect(
    request: DoctorRequest, folder: DoctorDir, job: str, end: JobStatus, seconds: float = VISIBLE_SECONDS
) -> tuple[list[NodeReport], list[Finding]]:
    """Return the reports that arrive within ``seconds``, and a finding about each node without one."""
    wait_until(lambda: all(folder.report(node).exists() for node in range(request.nodes)), seconds, 0.2)
    missing = [node for node in range(request.nodes) if not folder.report(node).exists()]
    reports = [NodeReport.read(folder.report(node)) for node in range(request.nodes) if node not in missing]
    if not missing:
        return reports, []
    nodes = ", ".join(map(str, missing))
    found = f"node {nodes} of job {job} left no report; the job ended as {end.name or 'unknown to squeue'}"
    files = sorted(folder.slurm.glob(f"{job}*.out"))
    lines = [line for path in files for line in path.read_text(errors="replace").splitlines() if line.strip()]
    last = f"; it ends: {lines[-1][:300]}" if lines else ", and it is empty: check the job's nodes."
    return reports, [stops("node report", found, f"The job's output is in {folder.slurm}{last}")]
