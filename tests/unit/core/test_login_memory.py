"""As many plans at once as the login node's memory allows."""

import subprocess
import sys
from pathlib import Path

import pytest

PLAN = """
import logging, sys, time
from pathlib import Path
from shardmake.core.login_memory import turn

logging.basicConfig(level="INFO", format="%(message)s")
log = Path("log")
with turn(1.0):
    with log.open("a") as file:
        print(1, file=file, flush=True)
    deadline = time.monotonic() + 60
    while log.read_text().count("1") < 2 and time.monotonic() < deadline:  # a second one runs at the same time
        time.sleep(0.01)
    time.sleep(0.3)
    text = log.read_text()
    assert 0 < text.count("1") - text.count("2") <= 2, text
    with log.open("a") as file:
        print(2, file=file, flush=True)
"""


def test_plans_beyond_the_memory_wait_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    children = [
        subprocess.Popen([sys.executable, "-c", PLAN], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for _ in range(5)
    ]
    printed = [child.communicate(timeout=90)[1] for child in children]
    assert [child.returncode for child in children] == [0] * 5, printed
    assert sum(text.startswith("Waiting for 2 other plans") for text in printed) == 3, printed
