"""The state of runs as `shardmake status` and `shardmake list` show it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from shardmake.commands import status
from shardmake.commands.listing import list_runs
from shardmake.commands.status import cells, describe, last_event, read_state, read_states
from shardmake.config.load import parse_config
from shardmake.config.models import Cluster, Config, Run
from shardmake.core.errors import ConfigError
from shardmake.core.tables import plain_table
from shardmake.launch import slurm_jobs
from shardmake.launch.jobs import LocalJobs, _process_id, job_name
from shardmake.launch.slurm_states import JobState, JobStatus, parse_rows
from shardmake.launch.submission_check import parse_start
from shardmake.run.attempt import AttemptDir, GpuUse, Heartbeat, SubmittedJob
from shardmake.run.attempt_history import save_history
from shardmake.run.metrics import MetricsLine
from shardmake.run.paths import RunDir
from shardmake.run.receipts import PushedTo, PushReceipt, WeightsReceipt
from shardmake.run.settings import current
from shardmake.run.state import DriverJobStatus, RunState, read_progress, total_steps
from tests import finished_run
from tests.unit.plans import make_cluster, make_training_settings

SLURM = make_cluster(executor="slurm")
LOCAL = make_cluster()
STAGES = ("fetch", "plan", "render", "data", "train", "consolidate", "evaluate", "push")
PUSH = {"to": "file:published/chat"}


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of which every stage is done."""
    monkeypatch.chdir(tmp_path)
    rundir = finished_run.make_rundir(tmp_path)
    WeightsReceipt(files={}).write(rundir.weights_receipt)
    rundir.fallbacks.mkdir()
    for record in (rundir.sources, rundir.memory_table, rundir.rendered, rundir.accelerate, rundir.deepspeed):
        record.touch()
    make_training_settings(max_steps=400).write(rundir.training)
    finished_run.make_data_receipt("d").write(rundir.data_receipt)
    PushReceipt(destinations=[PushedTo(to="file:published/chat")], files={}, model={}).write(rundir.push_receipt)
    for stage in STAGES:
        current(stage, finished_run.make_run(push=PUSH), LOCAL).write(rundir.stage_settings(stage))
    return rundir


@pytest.fixture
def training(finished: RunDir) -> RunDir:
    """A run that trains: job 12, attempt 2."""
    finished.train_receipt.unlink()
    for path in (finished.model, finished.evaluation.parent / "push"):
        shutil.rmtree(path)
    finished.evaluation.unlink()
    SubmittedJob(id="12", attempt=2, submitted=time.time() - 60).write(finished.job)
    finished.metrics.write_text(MetricsLine(step=95, loss=6.4, tokens_per_second=12345.6).as_text())
    return finished


def answer(
    monkeypatch: pytest.MonkeyPatch, rundir: RunDir, state: str, nodes: str, *, start: str = "", status: int = 0
) -> None:
    """Let squeue list the run's job."""
    rows = f"12|{state}|{nodes}|{job_name(rundir.root)}{start}\n" if state else ""
    monkeypatch.setattr(slurm_jobs, "run_slurm", lambda *_: subprocess.CompletedProcess([], status, rows, ""))


def row_of(rundir: RunDir, cluster: Cluster = SLURM, **changes: Any) -> RunState:
    config = Config(cluster="c.yaml", runs={"chat": finished_run.make_run(push=PUSH, **changes)})
    (row,) = read_states(config, cluster, rundir.root.parent)
    return row


def one_line(rundir: RunDir, cluster: Cluster = SLURM, **changes: Any) -> str:
    """The run's name, state and progress."""
    row = row_of(rundir, cluster, **changes)
    return f"{row.run}  {row.state}" + (f": {progress}" if (progress := row.progress()) else "")


def summary(run: Run, cluster: Cluster, rundir: RunDir, queue: dict[str, JobStatus] | None) -> str:
    return read_state(run, cluster, rundir, queue).state


def states(text: str) -> dict[str, str]:
    """Return the state and the changes by stage."""
    lines = [line.split() for line in text.splitlines()[1:9]]
    return {words[1].rstrip(":"): words[0] for words in lines}


def test_a_finished_run(finished: RunDir) -> None:
    text = describe(finished_run.make_run(push=PUSH), LOCAL, finished)
    assert states(text) == dict.fromkeys(STAGES, "done")
    assert "Trained 60 steps, 245,760 tokens, with zero2 on 2 ranks in 2 attempts." in text
    assert "pushed to                file:published/chat" in text and one_line(finished) == "chat  done"
    edited = finished_run.make_run(push=PUSH, report_to=["wandb"])  # which cannot change a result
    assert states(describe(edited, SLURM, finished)) == dict.fromkeys(STAGES, "done")
    finished.deepspeed.unlink()
    assert states(describe(edited, SLURM, finished))["render"] == "open"  # as Snakemake, which makes it again


def test_no_stage_is_done_whose_settings_changed_since(finished: RunDir) -> None:
    change = "learning_rate: 0.0005 -> 0.001"
    text = describe(finished_run.make_run(push=PUSH, learning_rate=1e-3), LOCAL, finished)
    expected = {"done": "fetch data", "changed": "plan render train", "outdated": "consolidate evaluate push"}
    assert states(text) == {stage: state for state, stages in expected.items() for stage in stages.split()}
    assert f"  changed   train: {change}" in text and "in 2 attempts, before the settings changed." in text
    assert one_line(finished, LOCAL, learning_rate=1e-3) == f"chat  changed since the last plan: {change}"
    other = describe(finished_run.make_run(push={"to": "file:elsewhere"}), LOCAL, finished)
    assert [stage for stage, state in states(other).items() if state != "done"] == ["push"]
    assert "pushed to                file:published/chat" in other, "what was pushed, not what is configured"


def test_a_plan_of_other_memory_is_not_done_until_the_run_is_trained(training: RunDir) -> None:
    text = describe(finished_run.make_run(push=PUSH), make_cluster(memory_gib_per_node=64.0), training)
    assert states(text)["plan"] == "changed" and "cluster.memory_gib_per_node: 8.0 -> 64.0" in text


def test_progress_while_training(training: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, training, "RUNNING", "c[1-2]")
    assert one_line(training) == "chat  starting"
    finished_run.publish_heartbeat(AttemptDir(training.attempts / "002"), "train", 96, median_step_seconds=0.5)
    progress = "step 96 of 400 (24%), loss 6.4, 12,346 tokens/s, 0.5 s a step, about 2 min 32 s left"
    assert one_line(training) == f"chat  training: {progress}"
    text = describe(finished_run.make_run(push=PUSH), SLURM, training)
    assert f"Training: {progress}\n  As job 12 (attempt 2) on c[1-2]; last heartbeat 0 s ago in phase train." in text
    assert states(text)["train"] == "running"
    use = [GpuUse(number="0", percent=90, watts=500), GpuUse(number="1", percent=45, watts=500)]
    finished_run.publish_heartbeat(AttemptDir(training.attempts / "002"), "train", 96, use, compute_seconds=[0.25] * 5)
    text = describe(finished_run.make_run(push=PUSH), SLURM, training)
    found = "kernels ran 68% of the time on 2 GPUs, at 500 W each; least on GPU 1 of c1 (45%)"
    assert f"Since its start {found}." in text
    assert "Rank 1 on c1 computes 1.6 times as long as the median rank (reported from 1.3 times on" in text
    training.stop_file.touch()
    assert "A stop was requested (runs/chat/train/STOP)" in describe(finished_run.make_run(push=PUSH), SLURM, training)


def test_a_length_in_epochs_is_converted_to_steps(training: RunDir) -> None:
    make_training_settings(max_steps=None, epochs=32.0).write(training.training)
    assert finished_run.make_plan().choice.global_batch_size == 16
    assert total_steps(training) == 32, "each epoch has whole batches"


@pytest.mark.parametrize(("state", "nodes", "words"), [
    ("PENDING", "(Resources)", "as job 12 (attempt 2)"),
    ("PENDING", "(Priority)", "(attempt 2). Slurm does not know when it will start."),
    ("PENDING", "(JobHeldAdmin)", "Slurm does not start job 12 until a person acts: JobHeldAdmin. Remove the reason"),
    ("", "", ""),
])  # fmt: skip
def test_a_waiting_job(training: RunDir, monkeypatch: pytest.MonkeyPatch, state: str, nodes: str, words: str) -> None:
    answer(monkeypatch, training, state, nodes, start="|N/A" if nodes == "(Priority)" else "")
    assert one_line(training) == f"chat  {'waits in the queue' if state else 'job 12 (attempt 2) has ended'}"
    text = describe(finished_run.make_run(push=PUSH), SLURM, training)
    assert words in text and states(text)["train"] == ("queued" if state else "unfinished")


def test_without_an_answer_of_slurm_the_heartbeat_is_shown(training: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, training, "", "", status=127)
    finished_run.publish_heartbeat(AttemptDir(training.attempts / "002"), "save", 96)
    text = describe(finished_run.make_run(push=PUSH), SLURM, training)
    assert "in phase save" in text and "Slurm does not answer." in text


def end(rundir: RunDir, reason: str, message: str, next_fallback: int | None = None) -> None:
    rundir.job.unlink(missing_ok=True)
    record = finished_run.make_record(attempt=2, job="12", end=reason, message=message, next_fallback=next_fallback)
    save_history(rundir.attempt_history, [record])


def test_a_failure_is_shown_with_attempt_reason_and_last_step(training: RunDir) -> None:
    end(training, "GPU out of memory", "Rank 3 on c2: CUDA out of memory.")
    (training.checkpoints / "checkpoint-90").mkdir(parents=True)
    assert one_line(training) == "chat  failed: GPU out of memory"
    text = describe(finished_run.make_run(push=PUSH), SLURM, training)
    assert "Attempt 2 (job 12) ended: Rank 3 on c2: CUDA out of memory." in text
    assert "The last logged step is 95. The newest checkpoint is of step 90." in text
    end(training, "preempted", "Slurm preempted the job.", next_fallback=0)
    assert states(text)["train"] == "failed" and "Fix the cause and run the same command again." in text
    assert one_line(training) == "chat  between two attempts: preempted"
    assert states(describe(finished_run.make_run(push=PUSH), SLURM, training))["train"] == "unfinished"


def test_a_requested_stop_is_shown_as_a_stop_and_not_promised_to_changed_settings(training: RunDir) -> None:
    end(training, "stop requested", "Training of chat saved and stopped at step 93. Run the same command again.")
    assert one_line(training) == "chat  stopped on request"
    note = "It ran before the settings changed. If they change the result, training starts anew."
    text = describe(finished_run.make_run(push=PUSH), LOCAL, training)
    assert "saved and stopped at step 93" in text and note not in text and states(text)["train"] == "cancelled"
    assert note in describe(finished_run.make_run(push=PUSH, learning_rate=0.5), LOCAL, training)


@pytest.fixture
def driver() -> Iterator[psutil.Process]:
    """A process that looks like a driver."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # shardmake"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def test_a_driver_without_a_job_is_shown(training: RunDir, driver: psutil.Process) -> None:
    training.job.unlink()
    (training.train / "driver.lock").write_text(f"process {driver.pid} on {socket.gethostname()}\n")
    assert one_line(training) == "chat  no job yet"
    (training.train / "driver.lock").write_text(f"process {driver.pid} on elsewhere\n")
    assert "no job yet" not in one_line(training)


def test_a_local_job_is_the_process(training: RunDir, driver: psutil.Process) -> None:
    SubmittedJob(id=_process_id(driver), attempt=2, submitted=0).write(training.job)
    assert LocalJobs(training.root).status(_process_id(driver)).state is JobState.RUNNING
    assert summary(finished_run.make_run(push=PUSH), LOCAL, training, None) == "starting"
    SubmittedJob(id="1@1", attempt=2, submitted=0).write(training.job)
    assert summary(finished_run.make_run(push=PUSH), LOCAL, training, None).endswith("has ended")
    finished_run.publish_heartbeat(AttemptDir(training.attempts / "002"), "train", 96)
    assert summary(finished_run.make_run(push=PUSH), LOCAL, training, None) == "training", "on another machine"


def test_runs_that_have_not_begun_or_cannot_be_read(finished: RunDir) -> None:
    runs = {"chat": finished_run.make_run(), "other": finished_run.make_run()}
    finished.evaluation.unlink()
    finished.stage_settings("train").write_text('{"format": 1}')
    chat, other = read_states(Config(cluster="c.yaml", runs=runs), LOCAL, finished.root.parent)
    assert chat.state.startswith("cannot be read: Cannot read ") and other.state == "not started"
    finished.stage_settings("train").unlink()
    assert summary(finished_run.make_run(push=PUSH), LOCAL, finished, None) == "next step: evaluate"


def test_nothing_is_written(finished: RunDir) -> None:
    """Also in a folder that belongs to another member of the lab."""

    def files() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_mode) for path in finished.root.rglob("*")}

    before, umask = files(), os.umask(0o002)
    os.umask(umask)
    describe(finished_run.make_run(push=PUSH), make_cluster(shared=True), finished)
    assert files() == before


def test_rows_of_squeue_are_of_the_runs_own_job(training: RunDir) -> None:
    foreign = {"12": JobStatus(JobState.RUNNING, "RUNNING", "c9", "another-job")}
    assert summary(finished_run.make_run(push=PUSH), SLURM, training, foreign).endswith("has ended")
    assert parse_rows(f"12|PENDING|(Priority)|{job_name(training.root)}")["12"].state is JobState.PENDING


@pytest.mark.parametrize(("scores", "line"), [
    ({"preferences": finished_run.PREFERENCES}, "pairs: reward"),
    ({"completions": finished_run.COMPLETIONS}, "completions: reward"), (dict(finished_run.RATED), "pairs: preference"),
], ids=["pairs", "completions", "reward model"])  # fmt: skip
def test_scores_are_shown(finished: RunDir, scores: dict[str, Any], line: str) -> None:
    finished_run.EVALUATED.model_copy(update=scores).write(finished.evaluation)
    text = describe(finished_run.make_run(push=PUSH), LOCAL, finished)
    assert f"Held-out {line} accuracy 87.5%, margin 1.2500." in text
    assert ("perplexity" in text) is (line != "pairs: preference")


START = "2026-11-23T14:30:00"


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with job 12."""
    monkeypatch.chdir(tmp_path)
    rundir = finished_run.make_rundir(tmp_path)
    rundir.train_receipt.unlink()
    SubmittedJob(id="12", attempt=2, submitted=time.time()).write(rundir.job)
    return rundir


def test_a_pending_job_has_its_reason_and_estimated_start(started: RunDir) -> None:
    queue = parse_rows(f"12|PENDING|(Priority)|{job_name(started.root)}|{START}\n")
    row = read_state(finished_run.make_run(), SLURM, started, queue)
    assert (row.stage, row.state, row.queue) == ("train", "waits in the queue", "pending (Priority)")
    assert row.expected_start == datetime.fromisoformat(START).timestamp() and cells(row)[-2] == "2026-11-23 14:30"
    assert parse_start("N/A") is None and parse_start("") is None


def test_a_row_has_progress_for_people_and_for_programs(started: RunDir) -> None:
    finished_run.publish_heartbeat(AttemptDir(started.attempts / "002"), "train", 45, median_step_seconds=2.0)
    queue = parse_rows(f"12|RUNNING|c[1-2]|{job_name(started.root)}|{START}\n")
    row = read_state(finished_run.make_run(), SLURM, started, queue)
    assert cells(row)[1:8] == ["train", "training", "60/60", "0.15", "205", "0 s", "running c[1-2]"]
    driver = DriverJobStatus(job="14", state="running", nodes="c3", log="runs/.driver/001/driver.log")
    read = json.loads(json.dumps(row.model_copy(update={"driver_job": driver}).as_json()))
    assert read["driver_job"] == {"job": "14", "state": "running", "nodes": "c3", "log": "runs/.driver/001/driver.log"}
    assert read["step"] == 60 and read["total"] == 60 and read["seconds_left"] == 0 and read["step_seconds"] == 2
    assert read["stages"]["evaluate"] == "outdated" and read["last_event"]["text"] == "job 12 submitted"


def test_time_left_is_unknown_without_a_total_or_a_speed(tmp_path: Path) -> None:
    beat = Heartbeat(rank=0, host="c1", pid=1, phase="train", step=3, time=0.0, median_step_seconds=0.0)
    assert read_progress(finished_run.make_rundir(tmp_path), beat)["seconds_left"] is None
    found = read_progress(RunDir(tmp_path / "none"), beat.model_copy(update={"median_step_seconds": 1.0}))
    assert found["step_seconds"] == 1 and found["total"] is None and found["seconds_left"] is None
    assert RunState(run="chat", state="training", step=3).progress() == "step 3"
    row = RunState(run="chat", state="cannot be read: no permission").as_json()
    assert row["driver_job"] is None and row["step"] is None and RunState.model_validate(row).run == "chat"


def test_the_last_event_is_the_newest_record(started: RunDir) -> None:
    assert str(last_event(started)) == "job 12 submitted, 0 s ago"
    started.stop_file.touch()
    os.utime(started.stop_file, (time.time() + 60, time.time() + 60))
    event = last_event(started)
    assert event and event.text == "stop requested"
    started.job.unlink()
    started.stop_file.unlink()
    event = last_event(started)
    assert event and event.text == "attempt 2 ended: finished" and event.time == 2100
    assert last_event(RunDir(Path("runs/none"))) is None


def test_a_plain_table_is_complete_and_leaves_out_empty_columns() -> None:
    assert plain_table(("run", "queue", "state"), [("a", "", "x" * 300), ("long", "", "y")]) == (
        f"run   state\na     {'x' * 300}\nlong  y"
    )


def test_one_squeue_for_all_runs(started: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run_slurm(*command: str) -> "subprocess.CompletedProcess[str]":
        asked.extend(word for word in command if word.startswith("--name"))
        return subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.setattr(slurm_jobs, "run_slurm", run_slurm)
    config = parse_config({"cluster": "c", "runs": dict.fromkeys(("chat", "b"), RUN)}, "test")
    rows = read_states(config, SLURM, Path("runs"))
    assert asked == [f"--name={job_name(started.root)}"] and [row.state for row in rows][1] == "not started"


RUN = finished_run.make_run().model_dump(exclude_unset=True)


def test_the_list_has_sweeps_and_folders_of_other_runs(started: RunDir) -> None:
    (started.root.parent / "old").mkdir()
    (started.root.parent / ".locks").mkdir()
    mixed = {"train": [{"source": "a.jsonl"}, {"source": "lab/b"}]}
    runs = {"chat": RUN, "mixed": RUN | {"data": mixed}, "grid": RUN | {"sweep": {"seed": [1, 2]}}}
    found = list_runs(parse_config({"cluster": "c", "runs": runs}, "test"), make_cluster(), Path("runs"))
    assert [run.size is not None and run.owner != "" for run in found] == [True, False, False, False, True]
    assert [tuple(run.cells()[:5]) for run in found] == [
        ("chat", "", "lab/base", "resources/demo/train.jsonl", "fetch"),
        ("mixed", "", "lab/base", "a.jsonl, lab/b", "fetch"),
        ("grid-s1", "grid", "lab/base", "resources/demo/train.jsonl", "fetch"),
        ("grid-s2", "grid", "lab/base", "resources/demo/train.jsonl", "fetch"),
        ("old", "", "", "", "not in the configuration"),
    ]


def test_watch_ends_with_an_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"^--watch cannot be used: the output is not a terminal\."):
        status.watch(lambda: [])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("time.sleep", Mock(side_effect=KeyboardInterrupt))
    status.watch(lambda: [RunState(run="chat", stage="train", state="training")])
    assert "chat" in capsys.readouterr().out
