"""Seconds until a job's first step, beside a bare ``sbatch``, and from a killed rank until the next step.

    python -m benchmarks.first_step [ROUNDS]

The three-node Slurm of the tests runs the same training under DDP on two nodes, in turn by ``shardmake train`` and by
a script of torchrun with transformers' Trainer. The time begins when the script of the job is written. In each round a
rank is then killed, after some steps, and trains from the newest checkpoint in a new job.
"""

import json
import os
import shlex
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
import sys, time
from pathlib import Path
from benchmarks.gpu_kit import bare
class Watch(bare.Watch):
    def on_step_end(self, args, state, control, **more):
        super().on_step_end(args, state, control, **more)
        if state.global_step == 1 and state.is_world_process_zero:
            Path(sys.argv[1]).write_text(str(time.time()))
bare.Watch = Watch
bare.main("bare", Path(sys.argv[2]), "demo")
"""
SCRIPT = """#!/bin/bash
#SBATCH --partition=gpu --qos=long --constraint=ib --nodes=2 --ntasks-per-node=1 --cpus-per-task=2 --output={output}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) GLOO_SOCKET_IFNAME=eth0
srun bash -c {words}
"""
RANKS = (
    "{python} -m torch.distributed.run --nnodes=2 --nproc_per_node=1 --node_rank=$SLURM_NODEID "
    "--master_addr=$MASTER_ADDR --master_port=29700 {program} {first} {work}"
)
SECONDS = 300


def main(rounds: int) -> None:
    """Print the medians, and write them to ``results/first_step.json`` with every round."""
    found: dict[str, list[float]] = {"shardmake train": [], "bare sbatch": [], "after a killed rank": []}
    with Cluster() as cluster, tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder) / "demo")
        run = make_fault_run(cluster, cluster.shared / "first-step", Path(folder) / "demo")
        run.configure("ddp")
        for _ in range(rounds):
            found["bare sbatch"].append(bare(run))
            start, recovery = ours(run)
            found["shardmake train"].append(start)
            found["after a killed rank"].append(recovery)
            run.remove_training()
            cluster.reset()
    medians = {name: round(median(seconds), 1) for name, seconds in found.items()}
    ratio = median(ours / bare for ours, bare in zip(found["shardmake train"], found["bare sbatch"], strict=True))
    RESULTS.write_text(json.dumps({"machine": machine(), "rounds": found}, indent=2) + "\n")
    print(f"{medians}; shardmake / bare {ratio:.2f}")


def ours(run: FaultRun) -> tuple[float, float]:
    """Return the seconds from the job's script to its first step, and from a killed rank to the next new step."""
    run.start()
    script = wait(lambda: next((run.checkout.run / "train/attempts/001").glob("slurm/*.sh"), None))
    first = wait(lambda: time.time() if run.checkout.metrics() else None)
    run.slow(0.5)  # so that the training has not ended before the fault
    beat = run.wait_for_steps(2 * run.every)
    run.send("KILL", beat.pid, beat.host)
    killed = time.time()
    again = wait(lambda: time.time() if any(line["attempt"] == 2 for line in run.checkout.metrics()) else None)
    (run.checkout.root / "orders/slow-1").unlink()
    assert run.wait() == 0, run.log()
    return first - script.stat().st_mtime, again - killed


def bare(run: FaultRun) -> float:
    """Return the seconds from the script of a job to the first step of transformers' Trainer."""
    folder = run.checkout.root
    first, program, script = folder / "first", folder / "bare.py", folder / "bare.sh"
    first.unlink(missing_ok=True)
    program.write_text(BARE)
    ranks = RANKS.format(python=sys.executable, program=program, first=first, work=folder)
    script.write_text(SCRIPT.format(output=folder / "bare.log", words=shlex.quote(ranks)))
    started = time.time()
    variables = run.environment | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{run.environment['PYTHONPATH']}"}
    run.cluster.run(["sbatch", "--wait", str(script)], cwd=folder, env=variables, timeout=SECONDS)
    return float(first.read_text()) - started


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
