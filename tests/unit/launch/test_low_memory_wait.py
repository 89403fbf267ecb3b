import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shardmake.launch.low_memory_wait import (
    HELD_VARIABLE,
    SECONDS,
    cached_squeue,
    claim_slot,
    other_trainings,
    still_waits,
)
from tests.programs import count_calls

DRIVER = """
import fcntl, sys
from shardmake.launch import low_memory_wait
lock = open(sys.argv[1], "a+")
fcntl.flock(lock, fcntl.LOCK_EX)
names = "SHARDMAKE_DRIVER_WAITED", "SHARDMAKE_STARTED_JOB"
restarted = f"import os; print('restarted', *(os.environ.get(name) for name in {names}))"
sys.orig_argv = [sys.executable, "-c", restarted]
kind, *words, snapshot = sys.argv[2:]
if kind == "start":
    low_memory_wait.wait_until_started(*words, lock.fileno(), snapshot)
name, limit, stop_file = words
low_memory_wait.wait_until_slot(name, int(limit), stop_file, lock.fileno(), snapshot)
"""


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def start(lock: Path, *words: str) -> "subprocess.Popen[str]":
    """Start a driver that waits at once. After the wait it prints whether it waited for a slot."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(lock), *words],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_snapshot_from_before_the_submission_does_not_end_the_wait(slurm: Path) -> None:
    (slurm / "queue").write_text("")
    assert cached_squeue(str(slurm / "snapshot"), SECONDS) is not None
    (slurm / "queue").write_text("7|PENDING|(None)|mine\n")
    with start(slurm / "lock", "start", "7", str(slurm / "snapshot")) as driver:
        wait_for(lambda: count_calls(slurm) == 2)
        time.sleep(0.5)
        assert is_waiting(driver)
        driver.kill()


@pytest.mark.parametrize(
    ("queue", "pending"),
    [
        ("7|PENDING|(None)|a\n", True),
        ("5|RUNNING|c1|b\n7|PENDING|(None)|a\n8|PENDING|(None)|c\n", True),
        ("7|RUNNING|c1|a\n", False),
        ("77|PENDING|(None)|a\n", False),
        ("\n", False),
        (None, True),
    ],
)
def test_a_job_is_pending_until_an_answer_says_otherwise(queue: str | None, pending: bool) -> None:
    assert still_waits("7", queue) is pending


@pytest.mark.parametrize(
    ("queue", "found"),
    [
        ("", []),
        ("1|RUNNING|c1|shardmake-chat-1\n2|PENDING||shardmake-code-2\n", ["shardmake-chat-1", "shardmake-code-2"]),
        ("1|RUNNING|c1|shardmake-mine-0\n2|PENDING||shardmake-code-2\n", ["shardmake-code-2"]),
        ("1|RUNNING|c1|9f3c-snakemake\n2|RUNNING|c1|bash\n3|RUNNING|c1|a|shardmake-x\n", []),
        ("1|RUNNING|c1|shardmake-odd|name-1\n", ["shardmake-odd|name-1"]),
    ],
)
def test_only_other_trainings_count(queue: str, found: list[str]) -> None:
    assert other_trainings(queue, "shardmake-mine-0") == found


def test_a_slot_is_claimed_once_until_the_next_query(slurm: Path) -> None:
    snapshot = slurm / "snapshot"
    (slurm / "queue").write_text("1|RUNNING|c1|shardmake-a-1\n")
    assert not claim_slot("shardmake-b-1", 1, str(snapshot))
    assert claim_slot("shardmake-b-1", 2, str(snapshot)) and claim_slot("shardmake-b-1", 2, str(snapshot))
    assert not claim_slot("shardmake-c-1", 2, str(snapshot))
    os.utime(snapshot, (0, time.time() - SECONDS))
    assert claim_slot("shardmake-c-1", 2, str(snapshot)), "b never submitted"
    os.utime(snapshot, (0, 0))
    (slurm / "queue").unlink()
    assert not claim_slot("shardmake-c-1", 2, str(snapshot)), "without an answer no slot is free"


@pytest.mark.parametrize("state", ["RUNNING|c1", "PENDING|(JobHeldAdmin)"])
def test_a_driver_starts_again_when_its_job_has_started_or_needs_a_person(slurm: Path, state: str) -> None:
    (slurm / "queue").write_text(f"7|{state}|shardmake-a-1\n")
    driver = start(slurm / "driver.lock", "start", "7", str(slurm / "waiting"))
    assert driver.communicate(timeout=60)[0] == "restarted None 7\n"


def test_a_job_that_needs_a_person_is_waited_for_once_that_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    held, released = "6|RUNNING|c1|b\n7|PENDING|(JobHeldUser)|a\n", "7|PENDING|(Priority)|a\n"
    monkeypatch.setenv(HELD_VARIABLE, "6")
    assert not still_waits("7", held), "another job was reported"
    monkeypatch.setenv(HELD_VARIABLE, "7")
    assert still_waits("7", held) and still_waits("7", released)
    assert not still_waits("7", held), "it is held once more"


def test_a_waiting_driver_is_small_and_holds_the_lock(slurm: Path) -> None:
    """It continues to wait while Slurm does not answer."""
    lock, snapshot = slurm / "driver.lock", slurm / "waiting"
    process = start(lock, "start", "7", str(snapshot))
    try:
        wait_for(lambda: snapshot.exists() and "failed" in snapshot.read_text())
        waiting = psutil.Process(process.pid)
        assert waiting.cmdline()[1:3] == ["-I", "-S"] and waiting.memory_full_info().pss < 8 << 20
        with lock.open("a+") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        process.kill()
        process.communicate()
    with lock.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_one_of_many_waiting_drivers_continues(slurm: Path) -> None:
    (slurm / "queue").write_text("1|RUNNING|c1|shardmake-a-1\n")
    details = ("2", str(slurm / "STOP"), str(slurm / "waiting"))
    drivers = [start(slurm / f"{name}.lock", "slot", f"shardmake-{name}-1", *details) for name in "bcd"]
    try:
        wait_for(lambda: all(is_waiting(driver) or driver.poll() is not None for driver in drivers))
        wait_for(lambda: any(driver.poll() is not None for driver in drivers))
        (restarted,) = [driver for driver in drivers if driver.poll() is not None]
        assert restarted.communicate()[0] == "restarted 1 None\n" and count_calls(slurm) == 1
    finally:
        for driver in drivers:
            driver.kill()
            driver.communicate()


def is_waiting(driver: "subprocess.Popen[str]") -> bool:
    """Return whether the driver sleeps in low memory, after its first query."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(driver.pid)
        return "low_memory_wait.py" in " ".join(process.cmdline()) and process.status() == psutil.STATUS_SLEEPING
    return False


def test_a_stop_file_ends_the_wait_for_a_slot(slurm: Path) -> None:
    (slurm / "queue").write_text("1|RUNNING|c1|shardmake-a-1\n")
    (slurm / "STOP").touch()
    driver = start(slurm / "b.lock", "slot", "shardmake-b-1", "1", str(slurm / "STOP"), str(slurm / "waiting"))
    assert driver.communicate(timeout=60)[0] == "restarted 1 None\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [(("slot", "shardmake-b-1", "1", "STOP"), "no job was submitted"), (("start", "7"), "job 7 stays in the queue")],
)
def test_an_interrupt_ends_the_wait_with_a_message(slurm: Path, words: tuple[str, ...], message: str) -> None:
    (slurm / "queue").write_text("1|RUNNING|c1|shardmake-a-1\n7|PENDING||shardmake-b-1\n")
    driver = start(slurm / "b.lock", *words, str(slurm / "waiting"))
    wait_for(lambda: (slurm / "waiting").exists() and "answered" in (slurm / "waiting").read_text())
    wait_for(lambda: is_waiting(driver))
    driver.send_signal(signal.SIGINT)
    assert message in driver.communicate()[1] and driver.returncode == 130
