"""CPU and wall seconds of each stage of the demo, beside those of another checkout.

    python -m benchmarks.stage_time [--steps N] CHECKOUT [RESULTS.json]

Each stage runs in one checkout and then in the other. Each has a folder and a cache of its own, so nothing is known
from an earlier run. The training is shortened to N steps. CPU seconds depend less on what else the machine does.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import machine
from shardmake.core.atomic import write_json

HERE = Path(__file__).resolve().parents[1]
STAGES = ("fetch", "plan", "render", "data", "train", "consolidate", "evaluate", "push", "report")


def prepare(checkout: Path, folder: Path, steps: int) -> None:
    """Make the demo's inputs in the empty ``folder``, with ``steps`` in its configuration."""
    for name in ("Snakefile", "workflow", "profiles"):
        (folder / name).symlink_to(checkout / name)
    shutil.copytree(checkout / "config", folder / "config")
    config = folder / "config/config.yaml"
    config.write_text(re.sub(r"max_steps: \d+", f"max_steps: {steps}", config.read_text()))
    measure(checkout, folder, "demo")


def measure(checkout: Path, folder: Path, *words: str) -> tuple[float, float]:
    """Run a command of ``checkout`` in ``folder``; return its CPU and wall seconds, those of its processes included."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "XDG_CACHE_HOME": str(folder / "cache")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else every stage compiles the checkout's modules again
    log, started = folder / f"{words[0]}.log", time.monotonic()
    with log.open("w") as output:
        command = [sys.executable, "-m", "shardmake.cli", *words]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{checkout}: {words[0]} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return usage.ru_utime + usage.ru_stime, time.monotonic() - started


def main() -> None:
    """Measure both checkouts stage by stage; print the seconds, their sums and the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("results", nargs="?", type=Path)
    arguments = parser.parse_args()
    checkouts = {"other": arguments.checkout.resolve(), "this": HERE}
    taken: dict[str, dict[str, tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as root:
        folders = {name: Path(root, name) for name in checkouts}
        for name, folder in folders.items():
            folder.mkdir()
            prepare(checkouts[name], folder, arguments.steps)
        for stage in STAGES:
            taken[stage] = {n: measure(checkouts[n], folders[n], stage, "sbatch-options") for n in checkouts}
            print(
                stage,
                *(f"{name} {cpu:.2f} CPU s, {wall:.1f} s;" for name, (cpu, wall) in taken[stage].items()),
                flush=True,
            )
    for what, kept in (("around the training", [stage for stage in STAGES if stage != "train"]), ("all", STAGES)):
        for kind, unit in enumerate(("CPU s", "wall s")):
            other, this = (sum(taken[stage][name][kind] for stage in kept) for name in checkouts)
            print(f"{what}: {other:.1f} -> {this:.1f} {unit}, {this / other:.2f} times")
    if arguments.results:
        write_json(arguments.results, {"machine": machine(), "steps": arguments.steps, "seconds": taken})


if __name__ == "__main__":
    main()
