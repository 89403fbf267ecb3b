import fcntl
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shardmake.launch.doze import is_pending

DRIVER = """
import fcntl, sys
from shardmake.launch.doze import doze
lock = open(sys.argv[1], "a+")
fcntl.flock(lock, fcntl.LOCK_EX)
doze("7", lock.fileno(), sys.argv[2])
"""


@pytest.mark.parametrize(
    ("queue", "pending"),
    [
        ("7|PENDING\n", True),
        ("5|RUNNING\n7|PENDING\n8|PENDING\n", True),
        ("7|RUNNING\n", False),
        ("77|PENDING\n", False),
        ("\n", False),
        (None, True),
    ],
)
def test_only_an_answer_without_the_job_wakes_the_driver(queue: str | None, pending: bool) -> None:
    assert is_pending("7", queue) is pending


def test_a_dozing_driver_is_small_and_holds_the_lock(tmp_path: Path) -> None:
    """Without Slurm there is no answer, so it dozes on."""
    lock, snapshot = tmp_path / "driver.lock", tmp_path / "pending"
    command = [sys.executable, "-c", DRIVER, str(lock), str(snapshot)]
    process = psutil.Popen(command, env={"PATH": "", "PYTHONPATH": ":".join(sys.path)}, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (snapshot.exists() and snapshot.read_text() == "silent\n"):
            assert time.monotonic() < deadline and process.is_running()
            time.sleep(0.05)
        assert process.cmdline()[1:3] == ["-I", "-S"]
        assert process.memory_full_info().pss < 8 << 20
        with lock.open("a+") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        process.kill()
        process.wait()
    with lock.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
