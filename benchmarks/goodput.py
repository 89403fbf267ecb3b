"""Effective training time ratio at 16 to 16,384 GPUs: ``python -m benchmarks.goodput``.

Failures are drawn at published rates and handled by the code that drives real runs: `shardmake.launch.outcome.decide`
decides what follows each end, with the same cap and attempt history. `Costs` holds everything that costs time, with its
source; nothing of it was measured on such a cluster. The file operations of saves and resumes, counted by
`benchmarks.scale`, are added at the rates assumed there. The checkpoint interval is that of ``every_steps: auto``.

Each training is simulated twice with the same failures. The first waits for its saves. The second has
``checkpoints: {asynchronous: true}``: it waits only until the checkpoint is on the nodes' scratch, and a failure loses
the upload that is under way.

The ratio is the published one (2410.21680): time spent on steps that were kept, by wall time without queueing.
"""

import argparse
import json
import math
import random
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from shardmake.checkpoint.interval import interval_seconds
from shardmake.launch.outcome import Action, Outcome, RetryState, decide
from shardmake.run.attempt_history import AttemptRecord, EndReason, failed_alike, failing_nodes, idle_attempts

RESULTS = Path(__file__).parent / "results/goodput.json"
SCALE = Path(__file__).parent / "results/scale.json"
HOUR, DAY = 3600.0, 86400.0
GPUS_PER_NODE = 8
SIZES = (16, 128, 1024, 2048, 4096, 8192, 12288, 16384)


@dataclass(frozen=True)
class Rates:
    """How often something fails."""

    name: str
    source: str
    per_node_day: float


RATES = (
    Rates("Llama 3", "2407.21783: 466 interruptions in 54 days on 16,384 GPUs (2,048 nodes)", 466 / 54 / 2048),
    Rates("Meta RSC-1", "2410.21680: 6.50 failures per 1000 node-days", 6.5e-3),
)
# After the causes of Llama 3's unexpected interruptions (2407.21783), rounded; which of the driver's ends each of them
# becomes is this benchmark's assumption.
KINDS = {
    EndReason.KILLED: 0.41,  # GPU and SRAM faults: a process dies
    EndReason.NODE_FAILURE: 0.17,  # HBM, host and power
    EndReason.COMMUNICATION: 0.12,  # switches, cables, adapters
    EndReason.HANG: 0.15,  # what no process reports
    EndReason.LOST: 0.15,  # unplanned host maintenance and the rest
}


@dataclass(frozen=True)
class Costs:
    """Seconds; the defaults are this benchmark's assumptions."""

    save: float = 30.0
    """Time for a checkpoint to reach the shared file system: 4 GB per GPU (the most that Llama 3 saves) from 16,384
    GPUs at the 2 TB/s that its storage sustains take 33 s (2407.21783, 3.3.1). Training waits for it unless saving is
    asynchronous (2410.21680 wants 10 s at 12,000 GPUs for a ratio of 0.9)."""
    local: float = 8.0
    """Training waits so long for an asynchronous save: the same 4 GB per GPU into the node's memory at 0.5 GB/s for
    each rank (results/saving.json says what was measured for ``/dev/shm``). The checkpoint counts ``save`` seconds
    after that."""
    drag: float = 0.02
    """Part of the speed that training loses while a checkpoint is on its way."""
    notice: float = 60.0
    """From the end of a process to the driver's next decision: 20 s of polling, Slurm's own delay."""
    hang: float = 600.0
    """``hang_seconds``: a hang is noticed after it."""
    start: float = 300.0
    """From the submission to the first step, without queueing: allocation, imports, loading, the first collective."""
    preflight: float = 5.0
    """Part of each start; a node that is still broken is found within it."""
    validate: float = 30.0
    """Before a resume the nodes read the checkpoint once, as fast as it was saved."""
    operations: bool = True
    """Add the file operations of a save, and of the choice and validation of a checkpoint (results/scale.json)."""
    still_broken: float = 0.3
    """Chance that a node that failed is handed out again and fails the preflight."""


@cache
def operation_seconds(gpus: int, *phases: str) -> float:
    """Return the seconds of the phases' file operations, in proportion to those of the largest counted job."""
    rows = [row for row in json.loads(SCALE.read_text())["phases"] if row["name"] in phases]
    largest = max(row["ranks"] for row in rows)
    return sum(row["waiting_seconds"] for row in rows if row["ranks"] == largest) * gpus / largest


@dataclass
class Training:
    """One simulated training: the clock, what is saved, and the driver's story."""

    chance: random.Random
    nodes: int
    rates: Rates
    costs: Costs
    asynchronous: bool = False
    wall: float = 0.0
    kept: float = 0.0
    """Seconds of training that are in a checkpoint."""
    persons: int = 0
    """Times the driver stopped, so that somebody had to start it again."""
    failures: int = 0

    def __post_init__(self) -> None:
        self.story: list[AttemptRecord] = []
        self.mean = DAY / (self.rates.per_node_day * self.nodes)
        gpus, counts = self.nodes * GPUS_PER_NODE, self.costs.operations
        save = self.costs.save + (operation_seconds(gpus, "save") if counts else 0.0)
        self.validate = self.costs.validate + (operation_seconds(gpus, "resume", "validate") if counts else 0.0)
        waits, upload = (self.costs.local, save) if self.asynchronous else (save, 0.0)
        self.every = interval_seconds(waits, self.mean, waits + upload if upload else 0.0)
        self.cycle = self.every + waits + self.costs.drag * upload
        """From the start of a save to that of the next."""
        self.upload = upload

    def run(self, seconds: float) -> float:
        """Train for ``seconds`` of kept time; the effective training time ratio."""
        self.wall += self.costs.start
        while self.kept < seconds:
            if self._until_failure(seconds):
                self._answer(self._draw_end())
        return seconds / self.wall

    def _until_failure(self, seconds: float) -> bool:
        """Train until the next failure or the end; what was not saved is lost. Whether there was a failure."""
        alive = self.chance.expovariate(1 / self.mean)
        left = seconds - self.kept
        needed = left + math.ceil(left / self.every) * (self.cycle - self.every)
        if alive >= needed:
            self.kept = seconds
            self.wall += needed
            return False
        self.kept += int(max(0.0, alive - self.upload) / self.cycle) * self.every
        self.wall += alive
        self.failures += 1
        return True

    def _draw_end(self) -> Outcome:
        end = self.chance.choices(list(KINDS), list(KINDS.values()))[0]
        self.wall += self.costs.hang if end is EndReason.HANG else self.costs.notice
        return Outcome(end, "simulated", host=f"node{self.chance.randrange(self.nodes)}")

    def _answer(self, outcome: Outcome) -> None:
        """Take the driver's decisions, with its own functions."""
        self._log(outcome)
        history = RetryState(
            idle_attempts=idle_attempts(self.story),
            has_fallback=False,
            host_failed_alike=failed_alike(self.story),
            failing_nodes=failing_nodes(self.story),
        )
        action = decide(outcome, history)
        if action in (Action.STOP, Action.GIVE_UP):
            self.persons += 1
            self.wall += HOUR  # until somebody looks
            self.story.clear()
        else:
            self.story[-1] = self.story[-1].model_copy(update={"next_fallback": 0})
        self.wall += self.costs.start + self.validate
        if action is Action.RESUME and self.chance.random() < self.costs.still_broken:
            self.wall += self.costs.preflight - self.costs.start - self.validate + self.costs.notice
            self._answer(Outcome(EndReason.PREFLIGHT, "simulated", host=outcome.host))

    def _log(self, outcome: Outcome) -> None:
        number = len(self.story) + 1
        record = AttemptRecord(
            attempt=number, job=str(number), plan="p", strategy="fsdp", fallback=0, submitted=0, ended=self.wall,
            end=outcome.end.value, message="", host=outcome.host, checkpoint_step=int(self.kept),
        )  # fmt: skip
        self.story.append(record)


PUBLISHED = (
    ("Llama 3, 16,384 GPUs", "> 0.90", "2407.21783"),
    ("Meta RSC, 2,048-4,096 GPUs, a checkpoint an hour", "> 0.90", "2410.21680"),
    ("MegaScale, 12,288 GPUs", "> 0.90", "2402.15627"),
    ("ByteRobust, 9,600 GPUs", "0.97", "2509.16293"),
)


def simulate(gpus: int, rates: Rates, costs: Costs, days: float, repeats: int, seed: int) -> dict[str, Any]:
    """The means over ``repeats`` trainings of ``days`` each, with the ratios' standard errors."""
    row: dict[str, Any] = {"gpus": gpus, "rates": rates.name}
    for saving in ("synchronous", "asynchronous"):
        chances = [random.Random(f"{seed} {gpus} {rates.name} {number}") for number in range(repeats)]
        nodes = gpus // GPUS_PER_NODE
        trainings = [Training(chance, nodes, rates, costs, saving == "asynchronous") for chance in chances]
        ratios = [training.run(days * DAY) for training in trainings]
        row["mean_hours_to_failure"] = round(trainings[0].mean / HOUR, 2)
        row[saving] = {
            "checkpoint_every_minutes": round(trainings[0].every / 60, 1),
            "failures": round(statistics.mean(training.failures for training in trainings), 1),
            "persons_needed": round(statistics.mean(training.persons for training in trainings), 2),
            "ratio": round(statistics.mean(ratios), 4),
            "standard_error": round(statistics.stdev(ratios) / math.sqrt(repeats), 5),
        }
    return row


def _columns(found: dict[str, Any]) -> str:
    return f"{found['checkpoint_every_minutes']:>8.1f} min {found['failures']:>8.1f} {found['ratio']:>6.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=54.0, help="length of the training")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=float, default=Costs.save, help="seconds to the shared file system")
    parser.add_argument("--local", type=float, default=Costs.local, help="seconds to the nodes' scratch")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    costs = Costs(save=arguments.save, local=arguments.local)
    both = ("synchronous", "asynchronous")
    print(f"{'':<28}" + "".join(f"{saving:>28}" for saving in both))
    print(f"{'GPUs':>6} {'rates':<11} {'MTTF h':>8} " + f"{'save every':>12} {'failures':>8} {'ratio':>6}" * 2)
    rows = []
    for rates in RATES:
        for gpus in SIZES:
            row = simulate(gpus, rates, costs, arguments.days, arguments.repeats, arguments.seed)
            rows.append(row)
            print(f"{gpus:>6} {rates.name:<11} {row['mean_hours_to_failure']:>8.1f} ", end="")
            print(*map(_columns, (row[saving] for saving in both)), sep="")
    print("\nPublished:")
    for where, ratio, source in PUBLISHED:
        print(f"  {ratio:<7} {where} ({source})")
    published = [{"where": where, "ratio": ratio, "source": source} for where, ratio, source in PUBLISHED]
    assumed = {"costs_seconds": vars(costs), "rates": [vars(rates) for rates in RATES], "days": arguments.days}
    result = {"simulated": rows, "published": published, "assumed": assumed, "machine": machine()}
    arguments.results.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
