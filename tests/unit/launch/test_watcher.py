"""A driver that waits or watches in low memory, and what it shows."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from shardmake.launch import watcher
from shardmake.launch.watcher import HELD_VARIABLE, REASON_VARIABLE, STARTED_VARIABLE, Progress, claim_slot
from tests.programs import count_calls
from tests.workflow.checkout import wait_for

DRIVER = """
import fcntl, sys
from shardmake.launch import watcher
lock = open(sys.argv[1], "a+")
fcntl.flock(lock, fcntl.LOCK_EX)
names = "SHARDMAKE_DRIVER_WAITED", "SHARDMAKE_STARTED_JOB", "SHARDMAKE_HELD_REASON"
restarted = f"import os; print('restarted', *(os.environ.get(name) for name in {names}))"
sys.orig_argv = [sys.executable, "-c", restarted]
kind, *words, snapshot = sys.argv[2:]
if kind == "job":
    job, state, folder = words
    files = f"{folder}/metrics.jsonl", f"{folder}/receipt.json", f"{folder}/node-0.log", folder
    watcher.watch_in_low_memory(job, state, files, "scancel 7", lock.fileno(), snapshot, quiet=False)
name, limit, stop_file = words
watcher.wait_until_slot(name, int(limit), stop_file, lock.fileno(), snapshot)
"""


def start(*words: str) -> "subprocess.Popen[str]":
    """Start a driver that waits at once. After the wait it prints whether it waited for a slot."""
    command, variables = [sys.executable, "-c", DRIVER, *words], {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=variables, text=True, **pipes)


@contextlib.contextmanager
def started(*commands: tuple[Path | str, ...]) -> Iterator[list["subprocess.Popen[str]"]]:
    """Start drivers that wait at once; kill those that wait in the end."""
    drivers = [start(*map(str, command)) for command in commands]
    try:
        yield drivers
    finally:
        for driver in drivers:
            driver.kill()
            driver.communicate()


@dataclass
class Watched:
    """The folder of a run whose job 7 a driver watches, in this process."""

    root: Path
    monkeypatch: pytest.MonkeyPatch

    def watch(self, queue: str | None, state: str = "pending") -> str:
        """Return why the watch ended: "again" if the driver starts again, else the name of the first pause."""
        self.monkeypatch.setattr(watcher.time, "sleep", Mock(side_effect=KeyboardInterrupt("pause")))
        for variable in (STARTED_VARIABLE, REASON_VARIABLE):
            self.monkeypatch.setenv(variable, "")  # so that it is removed after the test
        (self.root / "queue").unlink(missing_ok=True)
        if queue is not None:
            (self.root / "queue").write_text(queue)
        (self.root / "snapshot").unlink(missing_ok=True)
        files = [str(self.root / name) for name in ("metrics", "receipt", "log", "attempt")]
        try:
            watcher.watch_job("7", state, *files, "scancel 7", str(self.root / "snapshot"), "")
        except SystemExit:
            return "pause"
        assert os.environ[STARTED_VARIABLE] == "7"
        return "again"


@pytest.fixture
def watched(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    (slurm / "attempt").mkdir()
    return Watched(slurm, monkeypatch)


@pytest.mark.parametrize(("queue", "end", "printed"), [
    ("7|PENDING|(None)|a\n", "pause", ""),
    ("5|RUNNING|c1|b\n7|CONFIGURING|(None)|a\n8|PENDING|(None)|c\n", "pause", ""),
    ("7|RUNNING|c[1-2]|a\n", "pause", "The job is running on c[1-2].\n"),
    ("7|COMPLETING|c1|a\n", "pause", "The job is running on c1.\n"),
    ("77|PENDING|(None)|a\n", "again", ""), ("7|FAILED|c1|a\n", "again", ""), ("\n", "again", ""),
    (None, "pause", ""), ("7|PENDING|(JobHeldAdmin)|a\n", "again", ""),
    ("7|PENDING|(AssocGrpCPUMinutesLimit)|a\n", "again", ""), ("7|PENDING|(AssocGrpCpuLimit)|a\n", "pause", ""),
    ("7|PENDING|(ReqNodeNotAvail, Reserved for maintenance)|a\n", "pause", ""),
])  # fmt: skip
def test_a_job_is_watched_until_something_has_to_be_decided(
    watched: Watched, queue: str | None, end: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watched.watch(queue) == end
    assert capsys.readouterr().out == printed


def test_a_job_that_is_queued_again_or_ended_by_its_files(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    assert watched.watch("7|PENDING|(None)|a\n", "running") == "pause"
    assert capsys.readouterr().out.startswith("Slurm put the job back into the queue.")
    for file in ("receipt", "attempt/node-1.json"):
        (watched.root / file).touch()
        assert watched.watch("7|RUNNING|c1|a\n", "running") == "again"
        (watched.root / file).unlink()


def test_a_reason_that_may_pass_calls_a_person_after_an_hour(watched: Watched) -> None:
    watched.monkeypatch.setattr(watcher, "PATIENCE", 0.0)
    for reason in ("(AssocGrpCpuLimit)", "(Reservation)", "(ReqNodeNotAvail, Reserved for maintenance)"):
        assert watched.watch(f"7|PENDING|{reason}|a\n") == "again" and os.environ[REASON_VARIABLE] == reason
        watched.monkeypatch.setenv(HELD_VARIABLE, "7")
        assert watched.watch(f"7|PENDING|{reason}|a\n") == "pause", "it is reported once"
        watched.monkeypatch.delenv(HELD_VARIABLE)


def test_a_job_that_needs_a_person_is_watched_once_that_is_reported(watched: Watched) -> None:
    held, released = "6|RUNNING|c1|b\n7|PENDING|(JobHeldUser)|a\n", "7|PENDING|(Priority)|a\n"
    watched.monkeypatch.setenv(HELD_VARIABLE, "6")
    assert watched.watch(held) == "again", "another job was reported"
    watched.monkeypatch.setenv(HELD_VARIABLE, "7")
    assert watched.watch(held) == "pause" == watched.watch(released)
    assert watched.watch(held) == "again", "it is held once more"


def line(step: int, **values: object) -> str:
    return json.dumps({"step": step, "loss": 2.0, "learning_rate": 1e-3} | values) + "\n"


@pytest.mark.parametrize(("before", "after", "shown"), [
    (b"", b'{"step": 1, "loss": 2.5}\n"words"\nno JSON\n[1]\n{"loss": 1.0}\n{"step": 9, "lo', ["step      1  loss 2.5000"]),
    ((line(10) * 3).encode(), (line(5) + line(6, eval_loss=1.5) * 4).encode(), ["step      6  evaluation loss 1.5000"] * 2),
    (b"", b"\xff\xfe\n" + line(1, tokens_per_second=1e4).encode(), ["step      1  loss 2.0000  learning rate 1.00e-03  10,000 tokens/s"]),
], ids=["lines-that-are-not-metrics", "a-rewritten-file", "bytes-that-are-not-text"])  # fmt: skip
def test_progress_and_warnings_between_two_polls(tmp_path: Path, before: bytes, after: bytes, shown: list[str]) -> None:
    metrics, log = tmp_path / "metrics.jsonl", tmp_path / "node-0.log"
    metrics.write_bytes(before)
    log.write_text("[rank 0] WARNING: of an earlier start\n")
    said, warned = list[str](), list[str]()
    progress = Progress(str(metrics), str(log), said.append, warned.append)
    metrics.write_bytes(after)
    with log.open("a") as file:
        file.write("[rank 0] loaded\n[rank 0] WARNING: checkpoint-20 is skipped.\n/lib/x.py: FutureWarning: old\n")
    progress.poll()
    progress.poll()
    assert said[: len(shown)] == shown and warned == ["checkpoint-20 is skipped."]
    progress.hand_over()
    with log.open("a") as file:
        file.write("[rank 0] WARNING: written while one process took the other's place\n")
    for _ in range(2):  # a later attempt has another log
        Progress(str(metrics), str(log), said.append, warned.append).poll()
    assert warned[1:] == ["written while one process took the other's place"]


SNAKEMAKE = """
import subprocess, sys
command = "from shardmake.launch.watcher import snakemake_above as above; print(above())"
subprocess.run(["bash", "-c", '"$0" -c "$1"; true', sys.executable, command])
"""


def test_a_driver_knows_the_snakemake_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "snakemake").write_text(SNAKEMAKE)
    command = [sys.executable, tmp_path / "snakemake", "-c", "4", b"\xff"]  # as a folder's name in Latin-1
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert started.communicate()[0] == f"{started.pid}\n"
    monkeypatch.setenv(watcher.SNAKEMAKE_VARIABLE, str(started.pid))
    assert watcher.is_orphan()
    for alive in (str(os.getpid()), ""):
        monkeypatch.setenv(watcher.SNAKEMAKE_VARIABLE, alive)
        assert not watcher.is_orphan()


@pytest.mark.parametrize(("queue", "found"), [
    ("", []),
    ("1|RUNNING|c1|shardmake-chat-1\n2|PENDING||shardmake-code-2\n", ["shardmake-chat-1", "shardmake-code-2"]),
    ("1|RUNNING|c1|shardmake-mine-0\n2|PENDING||shardmake-code-2\n", ["shardmake-code-2"]),
    ("1|RUNNING|c1|9f3c-snakemake\n2|RUNNING|c1|bash\n3|RUNNING|c1|a|shardmake-x\n", []),
    ("1|RUNNING|c1|shardmake-odd|name-1\n", ["shardmake-odd|name-1"]),
])  # fmt: skip
def test_only_other_trainings_count(queue: str, found: list[str]) -> None:
    assert watcher.other_trainings(queue, "shardmake-mine-0") == found


def test_a_slot_is_claimed_once_until_the_next_query(slurm: Path) -> None:
    snapshot = slurm / "snapshot"
    (slurm / "queue").write_text("1|RUNNING|c1|shardmake-a-1\n")
    assert not claim_slot("shardmake-b-1", 1, str(snapshot))
    assert claim_slot("shardmake-b-1", 2, str(snapshot)) and claim_slot("shardmake-b-1", 2, str(snapshot))
    assert not claim_slot("shardmake-c-1", 2, str(snapshot))
    os.utime(snapshot, (0, time.time() - watcher.SECONDS))
    assert claim_slot("shardmake-c-1", 2, str(snapshot)), "b never submitted"
    os.utime(snapshot, (0, 0))
    (slurm / "queue").unlink()
    assert not claim_slot("shardmake-c-1", 2, str(snapshot)), "without an answer no slot is free"


def test_a_driver_that_watches_is_small_and_holds_the_lock(slurm: Path) -> None:
    lock, snapshot = slurm / "driver.lock", slurm / "waiting"
    (slurm / "queue").write_text("7|RUNNING|c1|shardmake-a-1\n")
    with started((lock, "job", "7", "running", slurm, snapshot)) as (process,):
        wait_for(lambda: snapshot.exists() and "answered" in snapshot.read_text() and is_waiting(process))
        watching = psutil.Process(process.pid)
        assert watching.cmdline()[1:3] == ["-I", "-S"] and watching.memory_full_info().uss < 8 << 20
        with lock.open("a+") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (slurm / "receipt.json").touch()
        assert process.communicate(timeout=60)[0] == "restarted None 7 None\n"
    with lock.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_one_of_many_waiting_drivers_continues(slurm: Path) -> None:
    (slurm / "queue").write_text("1|RUNNING|c1|shardmake-a-1\n")
    details = ("2", slurm / "STOP", slurm / "waiting")
    with started(*((slurm / f"{name}.lock", "slot", f"shardmake-{name}-1", *details) for name in "bcd")) as drivers:
        wait_for(lambda: all(is_waiting(driver) or driver.poll() is not None for driver in drivers))
        wait_for(lambda: any(driver.poll() is not None for driver in drivers))
        (restarted,) = [driver for driver in drivers if driver.poll() is not None]
        assert restarted.communicate()[0] == "restarted 1 None None\n" and count_calls(slurm) == 1


def is_waiting(driver: "subprocess.Popen[str]") -> bool:
    """Return whether the driver sleeps in low memory, after its first query."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(driver.pid)
        return "watcher.py" in " ".join(process.cmdline()) and process.status() == psutil.STATUS_SLEEPING
    return False


def test_a_stop_file_ends_the_wait_for_a_slot(slurm: Path) -> None:
    (slurm / "queue").write_text("1|RUNNING|c1|shardmake-a-1\n")
    (slurm / "STOP").touch()
    with started((slurm / "b.lock", "slot", "shardmake-b-1", "1", slurm / "STOP", slurm / "waiting")) as (driver,):
        assert driver.communicate(timeout=60)[0] == "restarted 1 None None\n"


@pytest.mark.parametrize(("words", "message"), [
    (("slot", "shardmake-b-1", "1", "STOP"), "no job was submitted"),
    (("job", "7", "pending", "folder"), "SIGTERM: scancel 7"),
])  # fmt: skip
def test_a_signal_ends_the_wait_with_a_message(slurm: Path, words: tuple[str, ...], message: str) -> None:
    (slurm / "queue").write_text("1|RUNNING|c1|shardmake-a-1\n7|PENDING||shardmake-b-1\n")
    with started((slurm / "b.lock", *words, slurm / "waiting")) as (driver,):
        wait_for(lambda: (slurm / "waiting").exists() and "answered" in (slurm / "waiting").read_text())
        wait_for(lambda: is_waiting(driver))
        driver.send_signal(signal.SIGINT if words[0] == "slot" else signal.SIGTERM)
        assert message in driver.communicate()[1] and driver.returncode == 130
