"""Logs of stages that have no result: where they are found, and what `status` and `logs` say of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardmake.commands import stage_logs
from shardmake.commands.stage_logs import last_message, local_stages, read_stage_log, stage_end, stage_jobs
from shardmake.commands.status import describe, read_state, unfinished_stage
from shardmake.launch import slurm_jobs
from shardmake.run.paths import RunDir
from tests.finished_run import make_run
from tests.unit.plans import make_cluster

OWN, SLURM = "logs/x/data.log", ".snakemake/slurm_logs/rule_data_run/x/8.log"
REFUSED = "Reading.\nError: prompts.jsonl: line 3 is not valid JSON.\nCorrect it.\n"
NO_CONTROLLER = "srun: error: no controller"
INNER = "RuleException:\nError in rule data_run:\nAt least one job did not complete successfully.\n"


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of which nothing is done, in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/x").mkdir(parents=True)
    return RunDir(tmp_path / "runs/x")


def write(*texts: tuple[str, str]) -> None:
    """Write logs, each a second newer than the one before."""
    for second, (name, text) in enumerate(texts):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
        os.utime(name, (1e9 + second, 1e9 + second))


@pytest.mark.parametrize(("texts", "state", "line"), [
    ([(OWN, REFUSED)], "failed", "prompts.jsonl: line 3 is not valid JSON. (2001-09-09"),
    ([(OWN, REFUSED), (SLURM, f"{REFUSED}{INNER}")], "failed", "line 3 is not valid JSON. (2001-09-09"),
    ([(OWN, REFUSED), (SLURM, f"{NO_CONTROLLER}\n{INNER}")], "failed", f"{NO_CONTROLLER} (job 8, 2001"),
    ([(SLURM, "a\nslurmstepd: error: Detected 1 oom_kill event in StepId=8.\n")], "failed", "(job 8, 2001-09-09"),
    ([(SLURM, "slurmstepd: error: *** JOB 8 ON c1 CANCELLED AT 2026-11-28T04:00:00 ***\n")], "cancelled", "JOB 8"),
    ([(SLURM, "slurmstepd: error: *** JOB 8 ON c1 CANCELLED AT 2026-11-28 DUE TO TIME LIMIT ***")], "failed", ""),
    ([(OWN, "Reading.\n50%\n")], "unfinished", "50% ("),
])  # fmt: skip
def test_a_stage_has_state_and_last_line(rundir: RunDir, texts: list[tuple[str, str]], state: str, line: str) -> None:
    write(*texts)
    run = make_run()
    shown = read_state(run, make_cluster(), rundir, None)
    assert (shown.stage, shown.stages["data"]) == ("data", state)
    assert shown.state.startswith(f"{state}: ") and line in shown.state
    assert f"  {state:<8}  data: " in describe(run, make_cluster(), rundir)
    assert unfinished_stage(run, make_cluster(), rundir) == "data"
    assert f"==> {texts[-1][0]}\n{texts[-1][1].splitlines()[0]}" in read_stage_log(rundir, "data", 40)


def test_slurms_queue_says_which_stages_wait_or_run(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path.cwd()
    rows = (
        f"8|PENDING|(Priority)|rule_data_run_wildcards_x|N/A|ann|{here}\n"
        f"9|RUNNING|c1|rule_consolidate_run_wildcards_x|N/A|ann|{here}\n"
        "7|RUNNING|c2|rule_evaluate_run_wildcards_x|N/A|ann|/elsewhere\n"
    )
    monkeypatch.setattr(slurm_jobs, "run_slurm", lambda *_: subprocess.CompletedProcess([], 0, rows, ""))
    write((OWN, REFUSED))
    shown = read_state(make_run(), make_cluster(executor="slurm"), rundir, None, stage_jobs(here))
    assert {stage: state for stage, state in shown.stages.items() if state != "open"} == {
        "data": "queued", "consolidate": "running"
    }  # fmt: skip
    assert shown.state == "queued: job 8 (Priority)"


def test_a_command_on_this_machine_is_running(rundir: RunDir) -> None:
    write((OWN, "Reading.\n"))
    command = [sys.executable, "-c", "input()", "shardmake", "data", "x"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert ("data", "x") in local_stages()
        assert stage_end(rundir, "data", {}, local_stages()) == stage_logs.StageEnd("running", "Reading.")
        process.communicate(b"\n")
    assert ("data", "x") not in local_stages()


def test_a_description_without_weights_is_a_fetch_that_has_not_begun(rundir: RunDir) -> None:
    write(("logs/x/fetch.log", "Fetched.\n"))
    rundir.sources.touch()
    assert stage_end(rundir, "fetch", {}, ()) is None
    write(("logs/x/fetch.log", "Fetched.\n"), ("logs/x/fetch-weights.log", "Error: no network.\n"))
    log = rundir.root.parent.parent / "logs/x/fetch-weights.log"
    assert last_message(rundir, "fetch") == (log, ["Error: no network."])
