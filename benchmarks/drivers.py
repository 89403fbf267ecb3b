"""Memory of many drivers whose jobs wait in the queue, each under the shell that Snakemake starts it in.

    python -m benchmarks.drivers [N]

Prints MiB of proportional set size (shared pages are divided among those who share them), in all and for each driver.
"""

import os
import signal
import sys
import tempfile
import time

import psutil

DRIVER = """
import fcntl, sys
from shardmake.launch.low_memory_wait import wait_until_started
lock = open(sys.argv[1], "a+")
fcntl.flock(lock, fcntl.LOCK_EX)
wait_until_started("7", lock.fileno(), sys.argv[2])
"""
RULE = 'set -euo pipefail; "$0" -c "$1" "$2" "$3" 2>&1 | tee -i "$2.log"'


def main(number: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = ["bash", "-c", RULE, sys.executable, DRIVER]
        snapshot = f"{folder}/pending"
        shells = [psutil.Popen([*words, f"{folder}/{run}", snapshot], start_new_session=True) for run in range(number)]
        try:
            while not all(is_waiting(shell) for shell in shells):
                time.sleep(0.2)
            sizes = [process.memory_full_info().pss for shell in shells for process in [shell, *descendants(shell)]]
        finally:
            for shell in shells:
                os.killpg(shell.pid, signal.SIGKILL)
    total = sum(sizes) / 2**20
    print(f"{number} waiting drivers: {total:.0f} MiB in all, {total / number:.1f} MiB each, shells included")


def descendants(shell: psutil.Process) -> list[psutil.Process]:
    return shell.children(recursive=True)


def is_waiting(shell: psutil.Process) -> bool:
    return any("low_memory_wait.py" in " ".join(process.cmdline()) for process in descendants(shell))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
