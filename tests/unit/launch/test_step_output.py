"""The output of Slurm's step, as srun prints it on the three-node Slurm."""

import pytest

from shardmake.launch.step_output import WORKER_STARTS, StepFailure, launcher_error, step_failure, was_cancelled

STARTED = "Starting the worker of job 25 on c1."
KILLED_LATER = [
    "srun: launch/slurm: _step_signal: Terminating StepId=25.0",
    "slurmstepd-c1: error: *** STEP 25.0 ON c1 CANCELLED AT 2026-11-25T05:41:02 ***", "srun: error: c1: task 0: Killed",
]  # fmt: skip
REQUEUED = [
    "slurmstepd-c1: error: *** JOB 25 ON c1 CANCELLED AT 2026-11-25T05:41:02 DUE TO JOB REQUEUE ***", *KILLED_LATER,
]  # fmt: skip


@pytest.mark.parametrize(("lines", "found"), [
    ([STARTED], None),
    ([STARTED, "srun: error: c3: task 2: Killed", *KILLED_LATER], StepFailure("c3", "Killed", 2)),
    ([STARTED, "srun: error: c3: tasks 2-3: Segmentation fault"], StepFailure("c3", "Segmentation fault", 2)),
    ([STARTED, "srun: error: c2: task 1: Exited with exit code 1", *KILLED_LATER], None),
    (
        [
            "srun: error: Task launch for StepId=25.0 failed on node c2: Socket timed out on send/recv operation",
            "srun: error: Application launch failed: Socket timed out on send/recv operation", STARTED, *KILLED_LATER,
        ],
        StepFailure("c2", "Socket timed out on send/recv operation", None),
    ),
    ([STARTED, *REQUEUED, STARTED], None),
    ([STARTED, *REQUEUED, STARTED, "srun: error: c2: task 1: Killed"], StepFailure("c2", "Killed", 1)),
])  # fmt: skip
def test_the_first_failure_of_the_last_start_counts(lines: list[str], found: StepFailure | None) -> None:
    assert step_failure(lines) == found


@pytest.mark.parametrize(("lines", "cancelled"), [
    (["slurmstepd-c1: error: *** JOB 1 ON c1 CANCELLED AT 2026-11-28T04:45:48 ***", "Terminated"], True),
    (["slurmstepd: error: *** JOB 1 ON c1 CANCELLED AT 2026-11-28T04:45:48 DUE to SIGNAL Terminated ***"], True),
    (["slurmstepd-c1: error: *** STEP 2.0 ON c1 CANCELLED AT 2026-11-28T04:45:55 ***"], False),
    (["slurmstepd-c1: error: *** JOB 3 ON c1 CANCELLED AT 2026-11-28T04:46:50 DUE TO TIME LIMIT ***"], False),
    (["slurmstepd-c1: error: *** JOB 3 ON c1 CANCELLED AT 2026-11-28T04:46:50 DUE TO PREEMPTION ***"], False),
    ([f"{WORKER_STARTS} a", "x: error: *** JOB 1 ON c1 CANCELLED AT 2 ***", f"{WORKER_STARTS} b"], False),
])  # fmt: skip
def test_slurms_own_lines_distinguish_a_scancel_from_other_ends(lines: list[str], cancelled: bool) -> None:
    """A preempted job that ends within its grace time has a line for its step only."""
    assert was_cancelled(lines) is cancelled


@pytest.mark.parametrize(("log", "raised"), [
    ("Traceback\ntorch.distributed.DistNetworkError: port: 2, EADDRINUSE\n[W] bye\n", "torch.distributed.DistNetworkError: port: 2, EADDRINUSE"),
    ("[rank0]: ValueError: bad label\ne.errors.ChildFailedError: \n", "ValueError: bad label"),
    ("OSError: caught\nSignal 9 (SIGKILL) received by PID 7\n", ""),
    ("all well\n", ""),
])  # fmt: skip
def test_what_a_launcher_raised(log: str, raised: str) -> None:
    assert launcher_error(log.splitlines()) == raised
