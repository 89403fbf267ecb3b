"""The workers' part of a restart inside the running job (``slurm.restart_in_place``), which is an attempt of its own.

After the ranks of all nodes ended, and no process of theirs is left, the workers wait for the driver. The driver
determines the cause and decides as after any attempt. If the nodes of the job can train on, it prepares the next
attempt and claims it as the one that follows in the job; all workers then start there, with a new rendezvous.
Otherwise the driver claims that none follows, and submits a new job after the end of this one. The workers claim the
same if the driver does not answer in time or the job is asked to stop. The first claim counts.
"""

import contextlib
import ctypes
import time

import psutil

from shardmake.core.errors import LinkError
from shardmake.run.attempt import AttemptDir
from shardmake.run.attempt_owner import NONE, claim_next, next_in_job

ANSWER_SECONDS = 60.0
"""How long the workers wait for the driver after the ranks of all nodes ended."""
_POLL_SECONDS = 0.25
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Let the processes below this one become its children when their parents end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(seconds: float = 30.0) -> bool:
    """Kill the processes below this one, and return whether all have ended; one in state D may not."""
    deadline = time.monotonic() + seconds
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)
    return not left


def waits_for_driver(folder: AttemptDir) -> bool:
    """Return whether the ranks of all nodes ended, some failed, nobody asked for a stop, and nothing is decided."""
    ended = folder.exits()
    if not ended or len(ended) < (attempt := folder.read()).job_nodes or not attempt.restart_in_place:
        return False
    trained = all(node.phase == "training" and not node.message and not node.stop_signal for node in ended)
    # After a kill for lack of memory, Slurm calls the whole job out of memory at its end, whatever the cause is then.
    failed = any(node.returncode for node in ended) and not any(node.oom_kills for node in ended)
    stops = folder.stop_file.exists() or attempt.rundir.stop_file.exists()
    return trained and failed and not stops and next_in_job(folder) is None


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
