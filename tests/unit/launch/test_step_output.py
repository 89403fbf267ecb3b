"""The output of Slurm's step, as srun prints it on the three-node Slurm."""

import pytest

from shardmake.launch.outcome import StepFailure, step_failure

STARTED = "Starting the worker of job 25 on c1."
KILLED_LATER = [
    "srun: launch/slurm: _step_signal: Terminating StepId=25.0",
    "slurmstepd-c1: error: *** STEP 25.0 ON c1 CANCELLED AT 2026-11-25T05:41:02 ***",
    "srun: error: c1: task 0: Killed",
]
REQUEUED = [
    "slurmstepd-c1: error: *** JOB 25 ON c1 CANCELLED AT 2026-11-25T05:41:02 DUE TO JOB REQUEUE ***",
    *KILLED_LATER,
]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([STARTED], None),
        ([STARTED, "srun: error: c3: task 2: Killed", *KILLED_LATER], StepFailure("c3", "Killed", 2)),
        ([STARTED, "srun: error: c3: tasks 2-3: Segmentation fault"], StepFailure("c3", "Segmentation fault", 2)),
        ([STARTED, "srun: error: c2: task 1: Exited with exit code 1", *KILLED_LATER], None),
        (
            [
                "srun: error: Task launch for StepId=25.0 failed on node c2: Socket timed out on send/recv operation",
                "srun: error: Application launch failed: Socket timed out on send/recv operation",
                STARTED,
                *KILLED_LATER,
            ],
            StepFailure("c2", "Socket timed out on send/recv operation", None),
        ),
        ([STARTED, *REQUEUED, STARTED], None),
        ([STARTED, *REQUEUED, STARTED, "srun: error: c2: task 1: Killed"], StepFailure("c2", "Killed", 1)),
    ],
)
def test_the_first_failure_of_the_last_start_counts(lines: list[str], found: StepFailure | None) -> None:
    assert step_failure(lines) == found
