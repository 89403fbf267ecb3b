"""The workers' part of a restart inside the running job (``slurm.restart_in_place``), which is an attempt of its own.

After the ranks of all nodes ended, and no process of theirs is left, the workers wait for the driver. The driver
determines the cause and decides as after any attempt. If the nodes of the job can train on, it prepares the next
attempt and claims it as the one that follows in the job; all workers then start there, with a new rendezvous.
Otherwise the driver claims that none follows, and submits a new job after the end of this one. The workers claim the
same if the driver does not answer in time or the job is asked to stop. The first claim counts.

Spare nodes (``slurm.spare_nodes``) wait from the start, and Slurm keeps the job if a node fails. The driver then writes
the exit record of the lost node, and the next attempt names the nodes of its ranks.
"""

import contextlib
import ctypes
import subprocess
import time

import psutil

from shardmake.core.errors import LinkError
from shardmake.launch.jobs import Jobs
from shardmake.launch.ready_ranks import READY
from shardmake.run.attempt import LOST, Attempt, AttemptDir, NodeExit
from shardmake.run.attempt_owner import NONE, claim_next, next_in_job

ANSWER_SECONDS = 60.0
"""How long the workers wait for the driver after the ranks of all nodes ended."""
_POLL_SECONDS = 0.25
_SPARE_POLL_SECONDS = 2.0
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Let the processes below this one become its children when their parents end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(seconds: float = 30.0) -> bool:
    """Kill the processes below this one but `READY`, and return whether all have ended; one in state D may not."""
    deadline = time.monotonic() + seconds
    while (left := _descendants()) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)
    return not left


def _descendants() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    spared = {process.pid for process in READY.processes()}
    return [process for process in found if process.pid not in spared]


def waits_for_driver(folder: AttemptDir) -> bool:
    """Return whether the ranks of all nodes ended, some failed, nobody asked for a stop, and nothing is decided.

    Without spare nodes, nodes that did not start their ranks cannot start them again.
    """
    ended = folder.exits()
    if not ended or len(ended) < (attempt := folder.read()).job_nodes or not attempt.restart_in_place:
        return False
    trained = attempt.spare_nodes or all(node.phase == "training" and not node.message for node in ended)
    if not trained or any(node.stop_signal or node.damaged for node in ended):
        return False
    # After a kill for lack of memory, Slurm calls the whole job out of memory at its end, whatever the cause is then.
    failed = any(node.returncode != 0 for node in ended) and not any(node.oom_kills for node in ended)
    stops = folder.stop_file.exists() or attempt.rundir.stop_file.exists()
    return failed and not stops and next_in_job(folder) is None


def record_lost_nodes(jobs: Jobs, folder: AttemptDir, nodes: str) -> None:
    """Write the exit records of nodes with ranks that Slurm removed from the job, which has ``nodes`` now.

    A job without spare nodes ends with the first of them.
    """
    attempt = Attempt.read_if_exists(folder.settings)
    if attempt is None or not attempt.spare_nodes or not (left := jobs.hosts(nodes)):
        return
    for rank in {*range(attempt.nodes)} - {node.node_rank for node in folder.exits()}:
        beats = folder.node_beats(rank)
        host = attempt.hosts[rank] if attempt.hosts else beats[0].host if beats else left[0]
        if host not in left:
            times = {"started": beats[0].time if beats else time.time(), "ended": time.time()}
            lost = NodeExit(node_rank=rank, host=host, phase=LOST, returncode=None, stop_signal=None, **times)
            lost.write(folder.exit_record(rank))


def end_job_without_script(jobs: Jobs, folder: AttemptDir, job: str) -> None:
    """Cancel a job whose first node was lost, once nothing follows in it and the ranks of all nodes ended."""
    attempt = Attempt.read_if_exists(folder.settings)
    is_over = attempt and attempt.spare_nodes and folder.count_exits() >= attempt.job_nodes
    if is_over and next_in_job(folder) == NONE and jobs.has_lost_script(job):
        subprocess.run(jobs.cancel_command(job).split(), check=False)


def wait_as_spare(folder: AttemptDir) -> AttemptDir | None:
    """Return the attempt that follows in this job, on a node without ranks; None if the job ends."""
    while (name := next_in_job(folder)) is None and not folder.stop_file.exists():
        time.sleep(_SPARE_POLL_SECONDS)
    return None if name in (None, NONE) else AttemptDir(folder.root.with_name(str(name)))


def wait_for_next(folder: AttemptDir, seconds: float = ANSWER_SECONDS) -> AttemptDir | None:
    """Return the attempt that follows in this job, once the driver has prepared it; None if the job ends."""
    deadline = time.monotonic() + seconds
    while waits_for_driver(folder) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    try:
        name = claim_next(folder, NONE)
    except (OSError, LinkError):  # a full disk, or somebody moved the checkout
        return None
    return None if name == NONE else AttemptDir(folder.root.with_name(name))
