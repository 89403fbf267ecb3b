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

from shardmake.launch.low_memory_wait import SECONDS, claim_slot, is_pending, other_trainings, read_queue

DRIVER = """
import fcntl, sys
from shardmake.launch import low_memory_wait
lock = open(sys.argv[1], "a+")
fcntl.flock(lock, fcntl.LOCK_EX)
woken = "import os; print('woken', os.environ.get('SHARDMAKE_DRIVER_WAITED'))"
sys.orig_argv = [sys.executable, "-c", woken]
kind, *words, snapshot = sys.argv[2:]
if kind == "start":
    low_memory_wait.wait_until_started(*words, lock.fileno(), snapshot)
name, limit, stop_file = words
low_memory_wait.wait_until_slot(name, int(limit), stop_file, lock.fileno(), snapshot)
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A squeue that prints the file ``queue``, counts its calls, and does not answer where there is no such file."""
    tool = tmp_path / "bin/squeue"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncat {tmp_path}/queue\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    return tmp_path


def asked(slurm: Path) -> int:
    return len((slurm / "asked").read_text().splitlines())


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.05)


def start(lock: Path, *words: str) -> "subprocess.Popen[str]":
    """A driver that dozes at once; woken, it says so, and whether it was for want of room that it waited."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(lock), *words],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_look_from_before_the_submission_wakes_nobody(slurm: Path) -> None:
    (slurm / "queue").write_text("")
    assert read_queue(str(slurm / "snapshot")) is not None
    (slurm / "queue").write_text("7|PENDING|mine\n")
    with start(slurm / "lock", "start", "7", str(slurm / "snapshot")) as driver:
        wait_for(lambda: asked(slurm) == 2)
        time.sleep(0.5)
        assert is_dozing(driver)
        driver.kill()


@pytest.mark.parametrize(
    ("queue", "pending"),
    [
        ("7|PENDING|a\n", True),
        ("5|RUNNING|b\n7|PENDING|a\n8|PENDING|c\n", True),
        ("7|RUNNING|a\n", False),
        ("77|PENDING|a\n", False),
        ("\n", False),
        (None, True),
    ],
)
def test_only_an_answer_without_the_job_wakes_the_driver(queue: str | None, pending: bool) -> None:
    assert is_pending("7", queue) is pending


@pytest.mark.parametrize(
    ("queue", "found"),
    [
        ("", []),
        ("1|RUNNING|shardmake-chat-1\n2|PENDING|shardmake-code-2\n", ["shardmake-chat-1", "shardmake-code-2"]),
        ("1|RUNNING|shardmake-mine-0\n2|PENDING|shardmake-code-2\n", ["shardmake-code-2"]),
        ("1|RUNNING|9f3c-snakemake\n2|RUNNING|bash\n3|RUNNING|a|shardmake-x\n", []),
        ("1|RUNNING|shardmake-odd|name-1\n", ["shardmake-odd|name-1"]),
    ],
)
def test_only_other_trainings_count(queue: str, found: list[str]) -> None:
    assert other_trainings(queue, "shardmake-mine-0") == found


def test_one_look_serves_many_and_a_new_one_can_be_asked_for(slurm: Path) -> None:
    snapshot = str(slurm / "snapshot")
    (slurm / "queue").write_text("7|RUNNING|shardmake-chat-1\n")
    assert [read_queue(snapshot) for _ in range(3)] == ["7|RUNNING|shardmake-chat-1\n\n"] * 3
    assert asked(slurm) == 1
    (slurm / "queue").write_text("")
    assert read_queue(snapshot, 0) == "\n" == read_queue(snapshot)
    assert asked(slurm) == 2
    (slurm / "queue").unlink()
    assert read_queue(snapshot, 0) is None


def test_a_place_is_claimed_once_until_the_next_look(slurm: Path) -> None:
    snapshot = slurm / "snapshot"
    (slurm / "queue").write_text("1|RUNNING|shardmake-a-1\n")
    assert not claim_slot("shardmake-b-1", 1, str(snapshot))
    assert claim_slot("shardmake-b-1", 2, str(snapshot)) and claim_slot("shardmake-b-1", 2, str(snapshot))
    assert not claim_slot("shardmake-c-1", 2, str(snapshot))
    os.utime(snapshot, (0, time.time() - SECONDS))
    assert claim_slot("shardmake-c-1", 2, str(snapshot)), "b never came"
    os.utime(snapshot, (0, 0))
    (slurm / "queue").unlink()
    assert not claim_slot("shardmake-c-1", 2, str(snapshot)), "no answer is no room"


def test_a_dozing_driver_is_small_and_holds_the_lock(slurm: Path) -> None:
    """Without an answer of Slurm, it dozes on."""
    lock, snapshot = slurm / "driver.lock", slurm / "waiting"
    process = start(lock, "start", "7", str(snapshot))
    try:
        wait_for(lambda: snapshot.exists() and snapshot.read_text() == "silent\n")
        dozing = psutil.Process(process.pid)
        assert dozing.cmdline()[1:3] == ["-I", "-S"] and dozing.memory_full_info().pss < 8 << 20
        with lock.open("a+") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        process.kill()
        process.communicate()
    with lock.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_of_many_that_wait_for_one_place_one_wakes(slurm: Path) -> None:
    (slurm / "queue").write_text("1|RUNNING|shardmake-a-1\n")
    details = ("2", str(slurm / "STOP"), str(slurm / "waiting"))
    drivers = [start(slurm / f"{name}.lock", "room", f"shardmake-{name}-1", *details) for name in "bcd"]
    try:
        wait_for(lambda: all(is_dozing(driver) or driver.poll() is not None for driver in drivers))
        wait_for(lambda: any(driver.poll() is not None for driver in drivers))
        (woken,) = [driver for driver in drivers if driver.poll() is not None]
        assert woken.communicate()[0] == "woken 1\n" and asked(slurm) == 1
    finally:
        for driver in drivers:
            driver.kill()
            driver.communicate()


def is_dozing(driver: "subprocess.Popen[str]") -> bool:
    """Whether it sleeps as what it became: its first look is behind it."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(driver.pid)
        return "low_memory_wait.py" in " ".join(process.cmdline()) and process.status() == psutil.STATUS_SLEEPING
    return False


def test_a_stop_file_wakes_a_driver_that_waits_for_room(slurm: Path) -> None:
    (slurm / "queue").write_text("1|RUNNING|shardmake-a-1\n")
    (slurm / "STOP").touch()
    driver = start(slurm / "b.lock", "room", "shardmake-b-1", "1", str(slurm / "STOP"), str(slurm / "waiting"))
    assert driver.communicate(timeout=60)[0] == "woken 1\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [(("room", "shardmake-b-1", "1", "STOP"), "nothing was submitted"), (("start", "7"), "job 7 goes on")],
)
def test_an_interrupt_ends_it_and_it_says_what_becomes_of_the_run(
    slurm: Path, words: tuple[str, ...], told: str
) -> None:
    (slurm / "queue").write_text("1|RUNNING|shardmake-a-1\n7|PENDING|shardmake-b-1\n")
    driver = start(slurm / "b.lock", *words, str(slurm / "waiting"))
    wait_for(lambda: (slurm / "waiting").exists() and "answered" in (slurm / "waiting").read_text())
    wait_for(lambda: is_dozing(driver))
    driver.send_signal(signal.SIGINT)
    assert told in driver.communicate()[1] and driver.returncode == 1
