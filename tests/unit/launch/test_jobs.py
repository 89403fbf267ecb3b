"""Parameters, submission and status of a Slurm job."""

import contextlib
import getpass
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.models import Slurm
from shardmake.core.errors import ShardmakeError, SlurmError
from shardmake.launch import slurm_jobs
from shardmake.launch.driver import train
from shardmake.launch.jobs import ActiveJob, LocalJobs, attempt_settings, job_name
from shardmake.launch.slurm_jobs import SlurmJobs, job_owners, lead_seconds, run_slurm, submit_with_retry
from shardmake.launch.slurm_states import JobState, parse_rows
from shardmake.run.attempt import AttemptDir, SubmittedJob
from shardmake.run.attempt_owner import claim, claim_next
from shardmake.run.driver_job import VARIABLE as DRIVER_VARIABLE
from shardmake.run.paths import RunDir
from tests.checkpoint_record import commit_checkpoint
from tests.programs import install_programs
from tests.unit.plans import make_cluster, make_plan, make_run
from tests.users import ATTACKER


@pytest.mark.parametrize(("saves", "limit", "lead"), [
    ([], "24:00:00", 120), ([3.0], "24:00:00", 120), ([100.0, 40.0], "24:00:00", 260), ([900.0], "01:00:00", 900),
    ([], "00:02:00", 30), ([10.0], "00:00:30", 15),
])  # fmt: skip
def test_the_lead_follows_the_slowest_save(tmp_path: Path, saves: list[float], limit: str, lead: int) -> None:
    for step, seconds in enumerate(saves):
        commit_checkpoint(tmp_path / f"train/checkpoints/checkpoint-{step}", step, save_seconds=seconds)
    assert lead_seconds(Slurm(time_limit=limit), tmp_path) == lead


def test_the_batch_script_repeats_cpus_and_has_a_wckey_only_if_configured(tmp_path: Path) -> None:
    folder, plan = AttemptDir(tmp_path / "train/attempts/001"), make_plan("zero3")

    def script(**slurm: Any) -> str:
        cluster = make_cluster(executor="slurm", slurm=Slurm(**slurm))
        return SlurmJobs(tmp_path, cluster).script(folder, plan, excluded=["c3"])

    text = script(exclude="c[7-9]")
    (srun,) = [line for line in text.splitlines() if line.startswith("srun ")]
    assert "--cpus-per-task=4" in srun and "--kill-on-bad-exit=1" in srun
    assert "#SBATCH --signal=USR2@120" in text and "#SBATCH --no-requeue" in text
    assert "c[7-9],c3" in text
    assert "#SBATCH --gres" not in text, "a CPU cluster has none"
    assert "--mpi=none" in script(srun_extra=["--mpi=none"])
    assert "wckey" not in text and "#SBATCH --wckey=lab" in script(wckey="lab")


NO_ANSWER = SlurmError("Slurm rejected the job: sbatch: error: Batch job submission failed: Socket timed out on send")


@pytest.mark.parametrize(("answers", "found", "result", "left"), [
    ([NO_ANSWER, NO_ANSWER, "7"], [None, None], "7", 0),
    ([NO_ANSWER, "7"], [SlurmError("Slurm does not answer")] * 3, "does not answer", 1), ([NO_ANSWER], ["6"], "6", 0),
    ([NO_ANSWER] * 3, [None] * 3, "Socket timed out", 0), ([NO_ANSWER] * 3, [None, None, "5"], "5", 0),
    ([SlurmError("Slurm rejected the job: Invalid account"), "8"], [], "Invalid account", 1),
], ids=["later", "nobody-can-say", "accepted-nevertheless", "never", "after-the-last-pause", "rejected"])  # fmt: skip
def test_submission_is_retried_only_while_slurm_knows_no_job(
    answers: list[str | SlurmError], found: list[str | SlurmError | None], result: str, left: int
) -> None:
    def take(these: list[Any]) -> Any:
        answer = these.pop(0)
        if isinstance(answer, SlurmError):
            raise answer
        return answer

    given, listed = list(answers), list(found)
    outcome = pytest.raises(SlurmError, match=result) if not result.isdigit() else contextlib.nullcontext()
    with outcome:
        assert submit_with_retry(lambda: take(given), lambda: take(listed), pauses=(0, 0, 0)) == result
    assert len(given) == left, "nothing is submitted while Slurm cannot say if it accepted the job"


@pytest.mark.parametrize(("control", "accounted", "state"), [
    ("slurm_load_jobs error: Invalid job id specified", "7|RUNNING|c1|NAME", JobState.GONE),
    ("slurm_load_jobs error: Invalid job id specified", "7|FAILED|c1|NAME", JobState.ENDED),
    ("slurm_load_jobs error: Invalid job id specified", "", JobState.GONE),
    ("slurm_load_jobs error: Unable to contact slurm controller", "7|RUNNING|c1|NAME", JobState.RUNNING),
    ("slurm_load_jobs error: Unable to contact slurm controller", "", JobState.UNKNOWN),
])  # fmt: skip
def test_accounting_that_missed_the_end_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: str, accounted: str, state: JobState
) -> None:
    def answer(*command: str) -> "subprocess.CompletedProcess[str]":
        if command[0] == "sacct":
            return subprocess.CompletedProcess(command, 0, accounted.replace("NAME", job_name(tmp_path)), "")
        return subprocess.CompletedProcess(command, 1, "", control)

    monkeypatch.setattr(slurm_jobs, "run_slurm", answer)
    monkeypatch.setattr(slurm_jobs, "cached_squeue", lambda _: "")
    assert SlurmJobs(tmp_path, make_cluster(executor="slurm")).status("7").state is state


@pytest.mark.parametrize(("nodes", "is_lost"), [("c1\nc3", False), ("c2\nc3", True)])
def test_a_job_that_lost_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: str, is_lost: bool) -> None:
    shown = "   ReqNodeList=(null) ExcNodeList=(null)\n   NodeList=c[1-3]\n   BatchHost=c1\n   NumNodes=2\n"
    answers = {"job": shown, "hostnames": nodes}
    done = subprocess.CompletedProcess
    monkeypatch.setattr(slurm_jobs, "run_slurm", lambda *words: done(words, 0, answers[words[2]], ""))
    assert SlurmJobs(tmp_path, make_cluster(executor="slurm")).has_lost_script("7") is is_lost


@pytest.mark.parametrize(("shown", "nodes_left", "user", "level", "counts"), [
    ("jobs,usage", 1, 4321, "None", True), ("usage", 1, 4321, "None", False), ("jobs", 2, 4321, "None", False),
    ("jobs", 1, None, "None", False), ("jobs", 1, 4321, "Operator", False), ("jobs", 1, 64030, "None", False),
])  # fmt: skip
def test_a_job_of_another_member_that_slurm_does_not_show_counts_until_its_nodes_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, nodes_left: int, user: int | None, level: str,
    counts: bool,
) -> None:  # fmt: skip
    """Operators and the user of Slurm see every job. None is the user who recorded it."""
    config = f"PrivateData             = {shown}\nSlurmUser               = slurm(64030)"
    programs = {"squeue": ":", "scontrol": f"echo '{config}'", "sacctmgr": f"echo '{level}'"}
    install_programs(tmp_path / "bin", monkeypatch, programs)
    rundir = RunDir(tmp_path / "runs/chat")
    folder = AttemptDir(rundir.attempts / "001")
    folder.root.mkdir(parents=True)
    decided: dict[str, Any] = {"settings_digest": "s", "plan_digest": "p", "result_settings": {}, "resume_from": None}
    plan = make_plan("zero3", nodes=2)
    attempt_settings(1, rundir.root, make_cluster(), plan, **decided).write(folder.settings)
    for rank in range(nodes_left):
        (folder.root / f"node-{rank}.json").touch()
    SubmittedJob(id="12", attempt=1, submitted=0.0).write(rundir.job)
    reason = rf"^Job 12 of {getpass.getuser()} may still train run chat: .* \(PrivateData\)\. Wait for its end\."
    if user is not None:
        monkeypatch.setattr("os.getuid", lambda: user)
    with pytest.raises(SlurmError, match=reason) if counts else contextlib.nullcontext():
        assert job_owners(rundir.root) == {}


def test_no_answer_of_slurm_is_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_programs(tmp_path, monkeypatch, {"scontrol": "exit 1"})
    with pytest.raises(SlurmError, match="scontrol does not answer"):
        slurm_jobs.hides_jobs()
    with pytest.raises(SlurmError, match=r"but 'queued'\. Run the same command again"):
        slurm_jobs.submitted_job(b"queued\n")
    for answer in ("job 1 of lab\nSubmitted batch job 7\n", "[site] Submitted batch job 7 on cluster c2\n"):
        assert slurm_jobs.submitted_job(answer) == "7"


def test_a_line_with_the_name_of_the_cluster_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SLURM_CLUSTERS, also of one cluster, Slurm 22.05 prints it in spite of --noheader."""
    install_programs(tmp_path, monkeypatch, {"sinfo": "echo 'CLUSTER: other'; echo 'c1|down*'; echo 'c2|idle'"})
    assert SlurmJobs(tmp_path, make_cluster(executor="slurm")).down_hosts(["c1", "c2"]) == ["c1"]


SBATCH = """
echo "$1" >> {folder}/submitted
if [ $(wc -l < {folder}/submitted) = 1 ]; then
    {accept_late}
    echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1
fi
echo "8|PENDING|||||$1" >> {folder}/queue
echo "job 1 of project lab is billed"
echo "Submitted batch job 8"
"""


class Controller:
    """A slurmctld that does not answer the first sbatch in time, and accepts its job 7 as ``accept_late`` says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, accept_late: str) -> None:
        sbatch = SBATCH.format(folder=folder, accept_late=accept_late.format(folder=folder))
        others = {"squeue": f"cat {folder}/queue", "scancel": f"echo $1 >> {folder}/cancelled", "srun": ""}
        install_programs(folder, monkeypatch, {"sbatch": sbatch, **others})
        for record in ("queue", "cancelled"):
            (folder / record).touch()
        monkeypatch.setattr(slurm_jobs.time, "sleep", lambda _: None)
        self.folder = folder
        self.jobs = SlurmJobs(folder, make_cluster(executor="slurm"))
        self.attempt = AttemptDir(folder / "train/attempts/001")
        self.attempt.root.mkdir(parents=True)

    def submit(self) -> str:
        return self.jobs.submit(self.attempt, make_plan("zero3"), [])

    def lines(self, record: str) -> list[str]:
        return (self.folder / record).read_text().splitlines()


QUEUED = 'echo "7|PENDING|||||$1" >> {folder}/queue'
STARTED = "mkdir {folder}/train/attempts/001/owner; touch {folder}/train/attempts/001/owner/7"


@pytest.mark.parametrize(("accept_late", "attempt_of_another_job", "job", "submitted", "cancelled"), [
    (QUEUED, "", "7", 1, []), (f"{QUEUED}; kill -9 $$", "", "7", 1, []), ("true", "000", "8", 2, []),
    (STARTED, "", "7", 2, ["8"]),
], ids=["despite-the-error", "client-killed", "of-another-attempt", "before-the-second-sbatch"])  # fmt: skip
def test_an_attempt_gets_one_job_whatever_sbatch_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accept_late: str, attempt_of_another_job: str, job: str,
    submitted: int, cancelled: list[str],
) -> None:  # fmt: skip
    slurm = Controller(tmp_path, monkeypatch, accept_late)
    if attempt_of_another_job:
        script = tmp_path / "train/attempts" / attempt_of_another_job / "slurm/.submission_file_1.sh"
        (tmp_path / "queue").write_text(f"5|PENDING|||||{script}\n")
    assert slurm.submit() == job and len(slurm.lines("submitted")) == submitted
    assert claim(slurm.attempt, "9") == job and slurm.lines("cancelled") == cancelled


def test_a_job_that_appears_after_a_second_sbatch_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Controller(tmp_path, monkeypatch, "true")
    assert slurm.submit() == "8"
    script = slurm.lines("submitted")[0]
    with (tmp_path / "queue").open("a") as queue:
        queue.write(f"7|PENDING|||||{script}\n")
    assert slurm.jobs.find() == ActiveJob("8", 1) and slurm.lines("cancelled") == ["7"]
    restarted = AttemptDir(tmp_path / "train/attempts/002")
    restarted.root.mkdir()
    claim_next(slurm.attempt, "002")  # job 8 continues there
    assert slurm.jobs.find() == ActiveJob("8", 2) and claim(restarted, "9") == "8"
    AttemptDir(tmp_path / "train/attempts/003").root.mkdir()
    assert slurm.jobs.find() is None and slurm.lines("cancelled") == ["7", "7", "8", "7"]


@pytest.mark.parametrize("in_driver_job", [False, True])
def test_a_limit_on_queued_jobs_names_the_driver_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_driver_job: bool
) -> None:
    slurm = Controller(tmp_path, monkeypatch, "true")
    install_programs(tmp_path, monkeypatch, {"sbatch": "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1"})
    if in_driver_job:
        monkeypatch.setenv(DRIVER_VARIABLE, str(tmp_path))
    with pytest.raises(SlurmError, match=r"not take the job at present: .*QOSMaxSubmitJobPerUserLimit") as error:
        slurm.submit()
    assert ("also counts the driver job" in str(error.value)) is in_driver_job


def test_a_command_that_cannot_start_returns_status_127(tmp_path: Path) -> None:
    program = tmp_path / "squeue"
    program.write_bytes(b"#!/bin/sh\nprintf '7|RUNNING|c1|caf\xe9\\n'\n")
    assert run_slurm(str(program)).returncode == 127, "not executable"
    program.chmod(0o700)
    assert parse_rows(run_slurm(str(program)).stdout)["7"].state is JobState.RUNNING


@pytest.mark.root
def test_a_job_that_another_user_runs_on_this_machine_is_not_adopted(tmp_path: Path) -> None:
    """The other user's driver was killed, and the worker continues."""
    rundir = RunDir(tmp_path / "runs/demo")
    folder = rundir.attempts / "001"
    words = ["/bin/sh", "-c", "read never", "-m", "shardmake.launch.worker", str(folder.absolute()), "0"]
    worker = subprocess.Popen(words, stdin=subprocess.PIPE, user=ATTACKER, group=ATTACKER)
    own = subprocess.Popen(words, stdin=subprocess.PIPE)
    try:
        with pytest.raises(ShardmakeError, match=rf"is being trained by job {worker.pid} of \w+\. You cannot adopt it"):
            train(make_run(), make_cluster(executor="local"), rundir)
        assert set(LocalJobs(rundir.root).other_owners()) == {str(worker.pid)}
    finally:
        for process in (own, worker):
            process.kill()
            process.wait()
    assert LocalJobs(rundir.root).other_owners() == {}
