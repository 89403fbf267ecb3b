"""Memory and file operations of many drivers that watch running jobs, each under the shell that Snakemake starts it in.

    python -m benchmarks.drivers [N]

Prints MiB that a driver shares with no other process, the same for its shell and its `tee`, and file operations a
second, which `strace` counts while a training appends a line of metrics every second. squeue is a stand-in.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

import psutil

DRIVER = """
import fcntl, sys
from shardmake.launch.watcher import watch_in_low_memory
folder = sys.argv[1]
lock = open(f"{folder}/lock", "a+")
fcntl.flock(lock, fcntl.LOCK_EX)
files = f"{folder}/metrics.jsonl", f"{folder}/receipt.json", f"{folder}/node-0.log", folder
watch_in_low_memory("7", "running", files, "", lock.fileno(), sys.argv[2], quiet=False)
"""
RULE = 'set -euo pipefail; "$0" -c "$1" "$2" "$3" 2>&1 | tee -i "$2/driver.log" > /dev/null'
SQUEUE = "#!/bin/sh\necho '7|RUNNING|c1|shardmake-chat-1'\n"
SECONDS = 30
TRACED = 3


def main(number: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        programs = Path(folder, "bin")
        programs.mkdir()
        (programs / "squeue").write_text(SQUEUE)
        (programs / "squeue").chmod(0o755)
        environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
        runs = [Path(folder, f"run-{run}") for run in range(number)]
        shells = []
        for run in runs:
            run.mkdir()
            words = ["bash", "-c", RULE, sys.executable, DRIVER, str(run), f"{folder}/waiting"]
            shells.append(psutil.Popen(words, start_new_session=True, env=environment))
        try:
            while not all(driver_of(shell) for shell in shells):
                time.sleep(0.2)
            drivers = [driver for shell in shells if (driver := driver_of(shell))]
            unshared = [driver.memory_full_info().uss / 2**20 for driver in drivers]
            others = [other.memory_full_info().uss / 2**20 for shell in shells for other in shell.children()]
            operations = count_operations(drivers[:TRACED], runs, Path(folder))
        finally:
            for shell in shells:
                os.killpg(shell.pid, signal.SIGKILL)
    shell_size = sum(others) / number - mean(unshared)
    print(
        f"{number} drivers that watch running jobs: {mean(unshared):.1f} MiB unshared each (at most "
        f"{max(unshared):.1f}), {shell_size:.1f} MiB for the shell's other processes, {operations:.1f} file operations "
        f"a second each"
    )


def driver_of(shell: psutil.Process) -> psutil.Process | None:
    return next((it for it in shell.children(recursive=True) if "watcher.py" in " ".join(it.cmdline())), None)


def count_operations(drivers: list[psutil.Process], runs: list[Path], folder: Path) -> float:
    """Return the file operations a second of each of ``drivers``."""
    traces = [folder / f"trace-{driver.pid}" for driver in drivers]
    tracers = [
        subprocess.Popen(["strace", "-f", "-q", "-e", "trace=%file,%desc", "-o", trace, "-p", str(driver.pid)])
        for trace, driver in zip(traces, drivers, strict=True)
    ]
    for step in range(SECONDS):
        for run in runs:
            with (run / "metrics.jsonl").open("a") as file:
                file.write(f'{{"step": {step}, "loss": 2.5, "learning_rate": 1e-5}}\n')
        time.sleep(1)
    for tracer in tracers:
        tracer.send_signal(signal.SIGINT)
        tracer.wait()
    lines = [line for trace in traces for line in trace.read_text().splitlines()]
    return (
        sum("(" in line and ("/" in line or "stat" in line or "getdents" in line) for line in lines)
        / SECONDS
        / len(traces)
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
