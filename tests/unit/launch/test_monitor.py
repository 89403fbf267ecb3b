"""Progress lines of a training that runs."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardmake.launch.monitor import ProgressPrinter, _describe_status
from shardmake.launch.slurm_states import JobState, JobStatus
from shardmake.run.metrics import parse_metrics


def line(step: int, **values: object) -> str:
    return json.dumps({"step": step, "loss": 2.0, "learning_rate": 1e-3} | values) + "\n"


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (JobStatus(JobState.PENDING, nodes="(None)"), "The job is pending."),
        (JobStatus(JobState.PENDING, nodes="(Priority)"), "The job is pending (Priority)."),
        (JobStatus(JobState.RUNNING, nodes="c[1-2]"), "The job is running on c[1-2]."),
        (JobStatus(JobState.UNKNOWN), "Slurm does not answer. The driver asks again; the job is not affected."),
    ],
)
def test_states_are_described(status: JobStatus, sentence: str) -> None:
    assert _describe_status(status) == sentence


@pytest.mark.parametrize(
    ("before", "after", "logged"),
    [
        ("", '{"step": 1, "loss": 2.5}\n"words"\nno JSON\n[1]\n{"loss": 1.0}\n{"step": 9, "lo', "step      1  loss 2.5000"),
        (line(10) * 3, line(5) + line(6, eval_loss=1.5) * 4, "step      6  evaluation loss 1.5000"),
    ],
    ids=["lines-that-are-not-metrics", "a-rewritten-file"],
)  # fmt: skip
def test_metrics_that_are_written_between_two_polls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: str, after: str, logged: str
) -> None:
    caplog.set_level("INFO", "shardmake")
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(before)
    progress = ProgressPrinter(metrics, tmp_path / "node-0.log")
    metrics.write_text(after)
    progress.poll()
    assert caplog.messages[0] == logged and (before or len(caplog.messages) == 1)


def test_bytes_that_are_not_text_do_not_end_the_driver(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    progress = ProgressPrinter(metrics, tmp_path / "node-0.log")
    metrics.write_bytes(b"\xff\xfe\n" + line(1).encode())
    progress.poll()
    assert [found.step for found in parse_metrics(metrics.read_text(errors="replace"))] == [1]


def test_warnings_of_rank_0_are_shown_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "node-0.log"
    log.write_text("[rank 0] WARNING: of an earlier start\n")
    progress = ProgressPrinter(tmp_path / "metrics.jsonl", log)
    with log.open("a") as file:
        file.write("[rank 0] loaded\n[rank 0] WARNING: checkpoint-20 is skipped.\n/lib/x.py: FutureWarning: old\n")
    progress.poll()
    progress.poll()
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "checkpoint-20 is skipped.")
    ]


IGNORES = """
import os, signal
from shardmake.launch.monitor import raise_on_signals
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with raise_on_signals():
    os.kill(os.getpid(), signal.SIGHUP)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_signals_that_nohup_ignores_stay_ignored() -> None:
    ended = subprocess.run([sys.executable, "-c", IGNORES], capture_output=True, text=True, check=False)
    assert ended.stdout == "still here\n" and signal.Signals.SIGTERM.name in ended.stderr
