"""Parse the output of Slurm's commands, and of its step as srun prints it on the three-node Slurm."""

from datetime import datetime

import pytest

from shardmake.launch import slurm_states
from shardmake.launch.slurm_states import JobState, JobStatus, held_message, is_no_such_job, parse_rows, parse_scontrol
from shardmake.launch.step_output import WORKER_STARTS, StepFailure, launcher_error, step_failure, was_cancelled
from shardmake.launch.watcher import PATIENCE


@pytest.mark.parametrize(("text", "state", "name"), [
    ("PENDING", JobState.PENDING, "PENDING"), ("RUNNING", JobState.RUNNING, "RUNNING"),
    ("COMPLETING", JobState.RUNNING, "COMPLETING"), ("COMPLETED", JobState.ENDED, "COMPLETED"),
    ("COMPLETED+", JobState.ENDED, "COMPLETED"), ("CANCELLED by 1000", JobState.ENDED, "CANCELLED"),
    ("CANCELLED+", JobState.ENDED, "CANCELLED"), ("OUT_OF_MEMORY", JobState.ENDED, "OUT_OF_MEMORY"),
    ("NODE_FAIL", JobState.ENDED, "NODE_FAIL"), ("REQUEUED", JobState.PENDING, "REQUEUED"),
    ("SPECIAL_EXIT", JobState.PENDING, "SPECIAL_EXIT"), ("UNKNOWN", JobState.UNKNOWN, "UNKNOWN"),
    ("SOMETHING_OF_SLURM_30", JobState.UNKNOWN, "SOMETHING_OF_SLURM_30"), ("", JobState.UNKNOWN, ""),
])  # fmt: skip
def test_every_state_is_recognized(text: str, state: JobState, name: str) -> None:
    assert slurm_states.parse_state(text) == (state, name)


def test_rows_of_squeue_and_sacct_and_the_answers_of_scontrol() -> None:
    text = "12|RUNNING|c[1-2]|a\n13|CANCELLED by 0|None assigned|b\n12.batch|RUNNING|c1|a\n14|COMPLETED+||c\n\nnoise\n"
    found = parse_rows(text)
    states = {"12": JobState.RUNNING, "13": JobState.ENDED, "14": JobState.ENDED}
    assert {job: status.state for job, status in found.items()} == states
    assert (found["12"].nodes, found["12"].job_name) == ("c[1-2]", "a")
    assert (found["13"].name, found["13"].cancelled_by) == ("CANCELLED", "0")
    assert parse_rows("7|NODE_FAIL|c1|a\n7|PENDING||a\n")["7"].state is JobState.PENDING, "it was queued again"
    text = "JobId=12 JobName=x\n   JobState=NODE_FAIL Reason=None Dependency=(null)\n   NodeList=c[2-3]\n   JobName=y"
    status = parse_scontrol(text)
    assert (status.state, status.name, status.nodes, status.job_name) == (JobState.ENDED, "NODE_FAIL", "c[2-3]", "x")
    assert is_no_such_job("slurm_load_jobs error: Invalid job id specified")
    assert not is_no_such_job("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")


@pytest.mark.parametrize("name", ["CANCELLED", "TIMEOUT", "COMPLETED"])
def test_a_preempted_job_may_have_another_state(name: str) -> None:
    text = "JobId=12 JobName=x JobState={} NodeList=c1 PreemptEligibleTime=2026-11-21T10:00:00 PreemptTime={}"
    assert parse_scontrol(text.format(name, "2026-11-21T10:05:00")).name == "PREEMPTED"
    assert parse_scontrol(text.format(name, "None")).name == name


@pytest.mark.parametrize(("end", "seconds"), [("21T10:05:00", 300.0), ("Unknown", 0.0), ("21T09:59:00", -60.0)])
def test_the_time_left_of_a_job(end: str, seconds: float) -> None:
    text = f"   StartTime=2026-11-21T09:00:00 EndTime={end.replace('21T', '2026-11-21T')} Deadline=N/A"
    assert slurm_states.parse_seconds_left(text, datetime(2026, 11, 21, 10)) == seconds
    assert slurm_states.parse_seconds_left("slurm_load_jobs error", datetime.now()) == 0


FOR_A_PERSON = (
    "JobHeldUser", "launch failed requeued held", "job requeued in held state", "DependencyNeverSatisfied", "InvalidQOS",
    "PartitionTimeLimit", "QOSMaxWallDurationPerJobLimit", "AssocGrpBillingMinutes", "ReservationDeleted",
    "QOSMaxGRESPerNode", "QOSMinGRES", "MaxMemPerLimit", "AssociationTimeLimit",
)  # fmt: skip
AFTER_AN_HOUR = (  # also while nodes are down, or other jobs of this user run
    "PartitionNodeLimit", "PartitionConfig", "ReqNodeNotAvail, UnavailableNodes:c3", "QOSMaxGRESPerUser", "MaxNodePerAccount",
)  # fmt: skip
ITS_TURN = ("Priority", "Resources", "QOSMaxJobsPerUserLimit", "Licenses", "Dependency", "BeginTime")


@pytest.mark.parametrize("reason", (*FOR_A_PERSON, *AFTER_AN_HOUR, *ITS_TURN))
def test_a_job_that_waits_for_a_person_differs_from_one_that_waits_for_its_turn(reason: str) -> None:
    held, status = reason in FOR_A_PERSON, JobStatus(JobState.PENDING, "PENDING", f"({reason})")
    message = held_message("7", status)
    assert bool(held_message("7", status, PATIENCE)) == (reason not in ITS_TURN)
    assert bool(message) == held
    assert not held or (f"until a person acts: {reason}." in message and "scontrol release 7" in message)
    assert not held_message("7", JobStatus(JobState.RUNNING, "RUNNING", "c[1-2]"))


STARTED = "Starting the worker of job 25 on c1."
KILLED_LATER = [
    "srun: launch/slurm: _step_signal: Terminating StepId=25.0",
    "slurmstepd-c1: error: *** STEP 25.0 ON c1 CANCELLED AT 2026-11-25T05:41:02 ***", "srun: error: c1: task 0: Killed",
]  # fmt: skip
REQUEUED = [
    "slurmstepd-c1: error: *** JOB 25 ON c1 CANCELLED AT 2026-11-25T05:41:02 DUE TO JOB REQUEUE ***", *KILLED_LATER,
]  # fmt: skip


@pytest.mark.parametrize(("lines", "found"), [
    ([STARTED], None), ([STARTED, "srun: error: c3: task 2: Killed", *KILLED_LATER], StepFailure("c3", "Killed", 2)),
    ([STARTED, "srun: error: c3: tasks 2-3: Segmentation fault"], StepFailure("c3", "Segmentation fault", 2)),
    ([STARTED, "srun: error: c2: task 1: Exited with exit code 1", *KILLED_LATER], None),
    ([
        "srun: error: Task launch for StepId=25.0 failed on node c2: Socket timed out on send/recv operation",
        "srun: error: Application launch failed: Socket timed out on send/recv operation", STARTED, *KILLED_LATER,
    ], StepFailure("c2", "Socket timed out on send/recv operation", None)),
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
    ("OSError: caught\nSignal 9 (SIGKILL) received by PID 7\n", ""), ("all well\n", ""),
])  # fmt: skip
def test_what_a_launcher_raised(log: str, raised: str) -> None:
    assert launcher_error(log.splitlines()) == raised
