"""Snakemake's log records of a requested stop, and of failures beside it."""

import logging
import subprocess
import sys
from enum import Enum, auto
from pathlib import Path

import pytest

from shardmake.commands.stop_filter import StopFilter
from shardmake.run.attempt_history import save_history
from shardmake.run.paths import RunDir
from tests.finished_run import make_record

COMMAND = "shardmake {} {} --config config/config.yaml 2>&1 | tee -i logs/train.log"
END = "WorkflowError:\nAt least one job did not complete successfully."


class Event(Enum):
    """Names as in Snakemake's `LogEvent`."""

    ERROR = auto()
    JOB_ERROR = auto()


def printed(filter: StopFilter, *records: logging.LogRecord) -> list[str]:
    return [record.getMessage() for record in records if filter.filter(record)]


def record(text: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("snakemake.logging", logging.ERROR, "", 0, text, (), None)
    vars(made).update(extra)
    return made


def failure(run: str, status: int, stage: str = "train") -> list[logging.LogRecord]:
    command = COMMAND.format(stage, run)
    text = f"CalledProcessError in file train.smk:\nCommand 'set -e; {command}' returned non-zero exit status {status}."
    return [record(text, event=Event.ERROR), record("Error in rule train_run", event=Event.JOB_ERROR, shellcmd=command)]


def the_end() -> list[logging.LogRecord]:
    words = "Exiting because a job execution failed. Look above for error messages", "Complete log(s): x", END
    return [record(text, event=Event.ERROR) if text == END else record(text) for text in words]


def test_a_requested_stop_ends_with_the_line_that_says_how_to_resume(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "demo")
    rundir.attempts.mkdir(parents=True)
    save_history(rundir.attempt_history, [make_record(end="stop requested", message="Saved at 93. Run again.")])
    found = printed(StopFilter(tmp_path), record("Job 1"), *failure("demo", 3), *the_end())
    assert found == ["Job 1", "Complete log(s): x", "Saved at 93. Run again."]


STOPPED = "Training of {} stopped as requested. Run the same command again to resume."
ENDED = "The driver of {} ended. The training's job, if there is one, is not affected."
INTERRUPTED = "evaluate of {} was interrupted. The same command continues it."


@pytest.mark.parametrize(("stage", "statuses", "line"), [
    ("train", (3, 3), STOPPED), ("train", (130, 143), ENDED), ("evaluate", (130,), INTERRUPTED),
])  # fmt: skip
def test_stops_and_signals_are_no_failures(tmp_path: Path, stage: str, statuses: tuple[int, ...], line: str) -> None:
    ends = dict(zip("ab", statuses, strict=False))
    failures = [one for run, status in ends.items() for one in failure(run, status, stage)]
    found = printed(StopFilter(tmp_path), *failures, *the_end())
    assert found[-1].splitlines() == [line.format(run) for run in ends]


@pytest.mark.parametrize(("stage", "log"), [("evaluate", "a/evaluate"), ("compare --sweep", "compare-a")])
def test_the_last_lines_of_a_failure_are_those_of_the_stage(tmp_path: Path, stage: str, log: str) -> None:
    file = tmp_path / f"logs/{log}.log"
    file.parent.mkdir(parents=True)
    file.write_text("Reading.\nError: an old one\nError: runs/a is gone.\nRestore it.\n")
    broken = printed(StopFilter(tmp_path / "runs"), *failure("a", 2, stage), *the_end())
    what = stage.partition(" ")[0]
    assert broken[-1] == f"{END}\n{what} of a failed, see {file}:\nError: runs/a is gone.\nRestore it."


def test_a_failure_beside_a_stop_is_reported_as_snakemake_does(tmp_path: Path) -> None:
    found = printed(StopFilter(tmp_path), *failure("a", 3), *failure("b", 2), *the_end())
    assert len(found) == 5 and "status 2" in found[0] and found[-1].startswith(f"{END}\ntrain of b failed.")
    other = record("Error in rule plan_run", event=Event.JOB_ERROR, shellcmd="shardmake plan c")
    assert printed(StopFilter(tmp_path), *failure("a", 3), other, *the_end())[-1] == f"{END}\nplan of c failed."


def test_a_lock_is_explained_with_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["/venv/bin/snakemake", "--profile", "slurm", "--config", "runs={a b}"])
    (left,) = printed(StopFilter(), record("LockException:\nError: Directory cannot be locked. Please make sure"))
    command = "snakemake --profile slurm --config 'runs={a b}'"
    assert left.endswith(f"remove the lock, and repeat the command:\n  {command} --unlock")
    with subprocess.Popen([sys.executable, "-c", "input()", "snakemake"], stdin=subprocess.PIPE) as other:
        (held,) = printed(StopFilter(), record("Error: Directory cannot be locked."))
        assert held.startswith(f"Error: Another Snakemake works in {tmp_path}: process {other.pid} (")
