"""A campaign of random faults on the three-node Slurm: ``python -m benchmarks.faults [STRATEGY ...] [--faults 40]``.

Each strategy trains twice on two of the nodes: once undisturbed, once with a fault after every few steps, drawn from a
seed. Nothing is simulated: processes are killed or stopped, nodes fail, links are cut, Slurm restarts jobs or its own
controller, files are damaged on disk. At the end the losses of every step and the final weights of both trainings are
compared. A driver gives up after three attempts without a new checkpoint, so each fault waits for a new one. The
results of a strategy replace its earlier ones in results/faults.json.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from shardmake.checkpoint import store
from shardmake.demo import make_inputs
from shardmake.run.paths import RunDir
from tests.cluster import test_faults as faults
from tests.cluster.baseline import STRATEGIES, Baseline, Ends, Fault
from tests.cluster.fault_run import FaultRun, cut_short, flip_a_bit, make_fault_run
from tests.cluster.harness import STATE, Cluster

RESULTS = Path(__file__).parent / "results/faults.json"
EVERY = 5
"""Steps between checkpoints."""
STEPS_PER_FAULT = 25
LAST_STEPS = 60
"""Steps at the end without a new fault: a training that finishes before its fault is there would be waited for."""
CHANCE = random.Random(1)
SHARDS = ("model_states.pt", "optim_states.pt", ".distcp")


def kill_rank_in_a_save(run: FaultRun, attempts: int) -> Ends:
    """Kill a rank at a random write of its next save."""
    run.wait_for_steps(2, attempts)
    checkpoints = RunDir(run.checkout.run).checkpoints
    order = {"folder": str(checkpoints), "log": str(run.checkout.root / "writes.log"), "mode": "before"}
    rank = CHANCE.randrange(2)
    run.order(f"killer-{rank}", json.dumps(order | {"at": r"rng_state" if rank else r"rng_state|\.json|latest"}))
    return [{"a process was killed", "communication failure"}]


def flip_a_bit_of_the_newest_checkpoint(run: FaultRun, attempts: int) -> Ends:
    """Flip a bit, then kill a rank, so that the checkpoint is needed."""
    return _damage(run, attempts, flip_a_bit)


def cut_the_newest_checkpoint(run: FaultRun, attempts: int) -> Ends:
    """Cut a file, then kill a rank."""
    return _damage(run, attempts, cut_short)


def _damage(run: FaultRun, attempts: int, harm: Any) -> Ends:
    beat = run.wait_for_steps(CHANCE.randint(2, 8), attempts)
    run.send("STOP", beat.pid, beat.host)
    time.sleep(1)  # the other rank finishes its part of a save
    record, path = next(iter(store.committed(RunDir(run.checkout.run).checkpoints)))
    harm(path / CHANCE.choice([name for name in record.files if name.endswith(SHARDS)]), CHANCE)
    run.send("KILL", beat.pid, beat.host)
    return [{"a process was killed", "communication failure"}]


FAULTS: list[Fault] = [
    faults.kill_rank, faults.kill_worker, faults.stop_rank, faults.kill_node, faults.cut_link,
    faults.signals_before_the_limit, faults.preempt, faults.restart_controller, faults.kill_and_restart_driver,
    faults.restart_job, kill_rank_in_a_save, flip_a_bit_of_the_newest_checkpoint, cut_the_newest_checkpoint,
]  # fmt: skip


def disturb(run: FaultRun, count: int) -> tuple[list[dict[str, Any]], int]:
    """Train through ``count`` faults to the end; return them, and how often a person had to start a driver."""
    rows: list[dict[str, Any]] = []
    needed = known = 0
    run.start()
    newest = wait_for_checkpoint(run, 0)
    while len(rows) < count and newest < run.steps - LAST_STEPS:
        fault, started = CHANCE.choice(FAULTS), time.time()
        run.wait_for_ends(known + len(fault(run, known + 1)), fault.__name__)
        run.cluster.repair_nodes()  # as the site's staff would do in the end
        step, newest = newest, wait_for_checkpoint(run, newest_step(run))
        if run.driver is None or run.driver.poll():
            needed += 1
            run.start()
            newest = wait_for_checkpoint(run, newest)
        ends = [record["end"] for record in run.history()[known:]]
        known += len(ends)
        rows.append({"fault": fault.__name__, "after_step": step, "ends": ends, "seconds": time.time() - started})
        print(f"{len(rows):4}  {json.dumps(rows[-1])}", flush=True)
    while run.wait(1800) != 0:
        needed += 1
        run.start()
    return rows, needed


def newest_step(run: FaultRun) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    return max((record.step for record, _ in store.committed(RunDir(run.checkout.run).checkpoints)), default=0)


def wait_for_checkpoint(run: FaultRun, step: int) -> int:
    """Return the step of the newest checkpoint once it is later than ``step``, or the driver has ended."""

    def is_there() -> bool:
        return (run.driver is not None and run.driver.poll() is not None) or newest_step(run) > step

    run.cluster.wait_until(is_there, "a new checkpoint", timeout=600)
    return newest_step(run)


def campaign(run: FaultRun, strategy: str, count: int) -> dict[str, Any]:
    """Return the comparison of a training with ``count`` faults and an undisturbed one."""
    run.repair()
    run.steps, run.every = count * STEPS_PER_FAULT, EVERY
    run.configure(strategy)
    baseline, undisturbed = undisturbed_training(run)
    started, before = time.time(), os.getloadavg()
    rows, needed = disturb(run, count)
    history, (losses, weights) = run.history(), (run.result(), run.weights())
    return {
        "strategy": strategy,
        "steps": run.steps,
        "steps_between_checkpoints": EVERY,
        "faults": len(rows),
        "faults_by_kind": dict(Counter(row["fault"] for row in rows)),
        "attempts": len(history),
        "ends_by_kind": dict(Counter(record["end"] for record in history)),
        "times_a_person_was_needed": needed,
        "seconds_undisturbed": round(undisturbed),
        "seconds_with_faults": round(time.time() - started),
        "largest_difference_of_losses": max(abs(baseline[0][step] - loss) for step, loss in losses.items()),
        "losses_of_every_step": losses.keys() == baseline[0].keys(),
        "weights_equal_bit_for_bit": all(torch.equal(weights[name], tensor) for name, tensor in baseline[1].items()),
        "machine": machine(before=before),
        "rows": rows,
    }


def undisturbed_training(run: FaultRun) -> tuple[Baseline, float]:
    """Return losses and weights of a training without faults, which is then removed, and its seconds."""
    started = time.time()
    run.remove_training()
    run.start()
    assert run.wait(1800) == 0, run.log()
    seconds = time.time() - started
    baseline = run.result(), run.weights()
    run.remove_training()
    return baseline, seconds


def keep(result: dict[str, Any]) -> None:
    """Put the campaign in place of the strategy's earlier one, and add all of them up."""
    known = json.loads(RESULTS.read_text())["campaigns"] if RESULTS.exists() else []
    campaigns = [each for each in known if each["strategy"] != result["strategy"]] + [result]
    summed = ("faults", "attempts", "times_a_person_was_needed")
    total: dict[str, Any] = {key: sum(each[key] for each in campaigns) for key in summed}
    total["equal_to_undisturbed"] = all(
        each["weights_equal_bit_for_bit"] and each["losses_of_every_step"] and not each["largest_difference_of_losses"]
        for each in campaigns
    )
    RESULTS.write_text(json.dumps({"all": total, "campaigns": campaigns}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategies", nargs="*", default=STRATEGIES)
    parser.add_argument("--faults", type=int, default=40, help="per strategy")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Cluster(STATE.with_name(f"{STATE.name}-campaign")) as cluster:
        make_inputs(Path(folder) / "inputs")
        run = make_fault_run(cluster, cluster.shared / "faults", Path(folder) / "inputs")
        for strategy in arguments.strategies:
            result = campaign(run, strategy, arguments.faults)
            print(json.dumps({key: value for key, value in result.items() if key != "rows"}), flush=True)
            keep(result)


if __name__ == "__main__":
    main()
