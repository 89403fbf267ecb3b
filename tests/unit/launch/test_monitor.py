"""Signals that end a driver."""

import signal
import subprocess
import sys

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
