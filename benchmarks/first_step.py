"""Seconds until a job's first step, beside a bare ``sbatch``, and from a killed rank until a step after the resume.

    python -m benchmarks.first_step [ROUNDS]

The three-node Slurm of the tests runs the same training under DDP on two nodes, in turn by ``shardmake train`` and by
a script of torchrun with transformers' Trainer. The time begins when the script of the job is written. In each round
rank 1 is then killed, after some steps: it trains from the newest checkpoint in a new job, or restarted in place, here
once the next ranks are ready; under torchrun (``--max-restarts``), which has no checkpoint here, from the first step.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import machine
from shardmake.demo import make_inputs
from tests.cluster.fault_run import FaultRun, make_fault_run
from tests.cluster.harness import Cluster
from tests.workflow.checkout import REPOSITORY

RESULTS = Path(__file__).parent / "results/first_step.json"
BARE = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu_kit import bare
start = str(int(os.path.exists(sys.argv[1] + "-killed")))
class Watch(bare.Watch):
    def on_step_end(self, args, state, control, **more):
        super().on_step_end(args, state, control, **more)
        if state.global_step == 1 and state.is_world_process_zero:
            Path(sys.argv[1] + start).write_text(str(time.time()))
        if state.global_step == 10 and start == "0" and not state.is_world_process_zero:
            Path(sys.argv[1] + "-killed").write_text(str(time.time()))
            os.kill(os.getpid(), 9)
bare.Watch = Watch
bare.main("bare", Path(sys.argv[2]), "demo")
"""
SCRIPT = """#!/bin/bash
#SBATCH --partition=gpu --qos=long --constraint=ib --nodes=2 --ntasks-per-node=1 --cpus-per-task=2 --output={output}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) GLOO_SOCKET_IFNAME=eth0
srun bash -c {words}
"""
RANKS = (
    "{python} -m torch.distributed.run --nnodes=2 --nproc_per_node=1 --max-restarts=3 --rdzv-backend=c10d "
    "--rdzv-endpoint=$MASTER_ADDR:29700 --rdzv-id=bare {program} {first} {work}"
)
SECONDS = 300
BARE_SECONDS = 120
"""After which torchrun is taken to hang: one of its restarts did not end within 300 s. It then runs again."""


def main(rounds: int) -> None:
    """Print the medians, and write them to ``results/first_step.json`` with every round."""
    names = ("shardmake train", "bare sbatch", "killed, new job", "killed, in place", "killed, torchrun")
    found: dict[str, list[float]] = {name: [] for name in names}
    with Cluster() as cluster, tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder) / "demo")
        run = make_fault_run(cluster, cluster.shared / "first-step", Path(folder) / "demo")
        for _ in range(rounds):
            for name, in_place in (("killed, new job", False), ("killed, in place", True)):
                run.configure("ddp", max_steps=60, slurm={"restart_in_place": in_place})
                start, recovery = ours(run, in_place)
                found[name].append(recovery)
                run.remove_training()
                cluster.reset()
            found["shardmake train"].append(start)
            start, recovery = bare(run)
            found["bare sbatch"].append(start)
            found["killed, torchrun"].append(recovery)
    medians = {name: round(median(seconds), 1) for name, seconds in found.items()}
    ratios = [
        f"{median(a / b for a, b in zip(found[first], found[second], strict=True)):.2f} {first} / {second}"
        for first, second in (names[:2], (names[3], names[2]), (names[3], names[4]))
    ]
    RESULTS.write_text(json.dumps({"machine": machine(), "rounds": found}, indent=2) + "\n")
    print(f"{medians}; {'; '.join(ratios)}")


def ours(run: FaultRun, in_place: bool) -> tuple[float, float]:
    """Return the seconds from the job's script to its first step, and from a killed rank to the next new step."""
    run.start()
    script = wait(lambda: next((run.checkout.run / "train/attempts/001").glob("slurm/*.sh"), None))
    first = wait(lambda: time.time() if run.checkout.metrics() else None)
    run.slow(1)
    beat = run.wait_for_steps(2 * run.every)
    if in_place:
        run.wait_for_ready_processes()
    run.slow(0)
    run.send("KILL", beat.pid, beat.host)
    killed = time.time()
    again = wait(lambda: time.time() if any(line["attempt"] == 2 for line in run.checkout.metrics()) else None)
    assert run.wait() == 0, run.log()
    return first - script.stat().st_mtime, again - killed


def bare(run: FaultRun) -> tuple[float, float]:
    """Return the same of Trainer under torchrun, with rank 1 killed after 10 steps, until its next first step."""
    folder = run.checkout.root
    first, program, script = folder / "first", folder / "bare.py", folder / "bare.sh"
    for time_file in folder.glob("first*"):
        time_file.unlink()
    program.write_text(BARE)
    ranks = RANKS.format(python=sys.executable, program=program, first=first, work=folder)
    script.write_text(SCRIPT.format(output=folder / "bare.log", words=shlex.quote(ranks)))
    variables = run.environment | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{run.environment['PYTHONPATH']}"}
    started = time.time()
    try:
        run.cluster.run(["sbatch", "--wait", str(script)], cwd=folder, env=variables, timeout=BARE_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"torchrun did not end within {BARE_SECONDS} s:\n{(folder / 'bare.log').read_text()[-2000:]}")
        run.cluster.reset()
        return bare(run)
    began, killed, again = (float((folder / f"first{name}").read_text()) for name in ("0", "-killed", "1"))
    return began - started, again - killed


def wait(condition: Callable[[], Any]) -> Any:
    """Return what ``condition`` returns once it is not None."""
    deadline = time.monotonic() + SECONDS
    while (found := condition()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{SECONDS} s have passed.")
        time.sleep(0.02)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
