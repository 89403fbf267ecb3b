"""A campaign of random faults over one training: ``python -m benchmarks.faults --work FOLDER``.

The same training runs twice on this machine, with two ranks: once uninterrupted, once with a fault every few steps,
drawn from a seed. Nothing is simulated: processes are killed or stopped, files are damaged on disk. At the end the
losses of every step and the last checkpoint of both trainings must be equal. The driver gives up after three attempts
without a new checkpoint, so the campaign lets one in three attempts get as far as a checkpoint.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from shardmake.checkpoint import store
from shardmake.checkpoint.record import find_problems
from shardmake.run.attempt import AttemptDir, Heartbeat
from shardmake.run.paths import RunDir

RESULTS = Path(__file__).parent / "results/faults.json"
EVERY = 5
"""Steps between checkpoints."""
CLUSTER = {
    "executor": "local",
    "processes_per_node": 2,
    "cpus_per_node": 2,
    "memory_gib_per_node": 6,
    "hang_seconds": 5,
}
RUN = {
    "model": "inputs/base",
    "data": {"train": "inputs/train.jsonl", "eval": "inputs/eval.jsonl"},
    "sequence_length": 32,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 1e-3,
    "checkpoints": {"every_steps": EVERY, "keep": 3},
}


@dataclass
class Lab:
    """A folder with inputs, configuration and one run, and what the campaign knows of it."""

    root: Path
    name: str
    damaged: set[float] = field(default_factory=set)
    """Times of the seals of the checkpoints that the campaign damaged."""

    @property
    def rundir(self) -> RunDir:
        """The run's folder."""
        return RunDir(self.root / "runs" / self.name)

    def shardmake(self, stage: str) -> subprocess.Popen[str]:
        """Start a stage."""
        log = (self.root / f"{self.name}.log").open("a")
        program = Path(sys.executable).with_name("shardmake")
        return subprocess.Popen([program, stage, self.name], cwd=self.root, stdout=log, stderr=log, text=True)

    def attempt(self) -> AttemptDir | None:
        """The newest attempt."""
        found = sorted(self.rundir.attempts.glob("[0-9]*"))
        return AttemptDir(found[-1]) if found else None

    def beats(self) -> list[Heartbeat]:
        """The last heartbeats of the newest attempt."""
        attempt = self.attempt()
        found = [attempt.beat(rank) for rank in (0, 1)] if attempt else []
        return [beat for beat in found if beat]

    def step(self) -> int:
        """Steps that all ranks of the newest attempt have done."""
        beats = self.beats()
        return min(beat.step for beat in beats) if len(beats) == 2 else 0

    def worker(self) -> psutil.Process:
        """The worker of the running job."""
        return psutil.Process(int(json.loads(self.rundir.job.read_text())["id"].partition("@")[0]))

    def newest(self) -> int:
        """Step of the newest checkpoint that counts and that the campaign left alone."""
        records = [record for record, _ in store.committed(self.rundir.checkpoints)]
        return max((record.step for record in records if record.saved_at not in self.damaged), default=0)

    def losses(self) -> dict[int, float]:
        """Mean loss over the steps since the line before, by step.

        Without the first line of each attempt, whose mean is over fewer steps if it resumed between two lines.
        """
        lines = [json.loads(line) for line in self.rundir.metrics.read_text().splitlines()]
        pairs = itertools.pairwise(lines)
        return {line["step"]: line["loss"] for before, line in pairs if line["attempt"] == before["attempt"]}


def configure(root: Path, strategy: str, steps: int) -> None:
    """Write the inputs and two equal runs, ``baseline`` and ``faulty``."""
    program = Path(sys.executable).with_name("shardmake")
    subprocess.run([program, "demo", "inputs"], cwd=root, check=True)
    (root / "config").mkdir()
    (root / "config/cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    run = RUN | {"strategy": strategy, "max_steps": steps}
    config = {"cluster": "config/cluster.yaml", "runs": {"baseline": run, "faulty": run}}
    (root / "config/config.yaml").write_text(yaml.safe_dump(config))
    for name in ("baseline", "faulty"):
        for stage in ("plan", "render", "data"):
            assert Lab(root, name).shardmake(stage).wait() == 0, (root / f"{name}.log").read_text()


# ---- faults: each is done to a training that makes steps; True if the attempt continues ------------------------


def kill_rank(lab: Lab, chance: random.Random) -> bool:
    """SIGKILL one rank."""
    os.kill(chance.choice(lab.beats()).pid, signal.SIGKILL)
    return False


def kill_rank_in_a_save(lab: Lab, chance: random.Random) -> bool:
    """SIGKILL one rank while a checkpoint is being written."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(lab.rundir.checkpoints.glob(f"{store.STAGING}*")):
            time.sleep(chance.uniform(0, 0.05))
            break
        time.sleep(0.001)
    return kill_rank(lab, chance)


def kill_launcher(lab: Lab, chance: random.Random) -> bool:
    """SIGKILL `accelerate launch`; the kernel ends its ranks."""
    lab.worker().children()[0].kill()
    return False


def kill_worker(lab: Lab, chance: random.Random) -> bool:
    """SIGKILL the worker; launcher and ranks go with it."""
    lab.worker().kill()
    return False


def stop_rank(lab: Lab, chance: random.Random) -> bool:
    """SIGSTOP one rank: it hangs."""
    os.kill(chance.choice(lab.beats()).pid, signal.SIGSTOP)
    return False


def preempt(lab: Lab, chance: random.Random) -> bool:
    """SIGTERM to the worker, as Slurm preempts."""
    lab.worker().terminate()
    return False


def reach_the_limit(lab: Lab, chance: random.Random) -> bool:
    """SIGUSR2 and some more signals to the worker, as before the time limit."""
    worker = lab.worker()
    for number in (signal.SIGUSR2, signal.SIGUSR2, signal.SIGTERM):
        worker.send_signal(number)
        time.sleep(chance.uniform(0, 0.3))
    return False


def kill_driver(lab: Lab, chance: random.Random) -> bool:
    """Nothing else: the campaign kills the driver and starts another."""
    return True


def damage(lab: Lab, chance: random.Random, how: Callable[[Path, random.Random], None]) -> bool:
    """Damage a file of the newest checkpoint, then kill a rank so that it is wanted."""
    newest = next(store.committed(lab.rundir.checkpoints), None)
    if newest:
        files = [newest[1] / name for name, entry in newest[0].files.items() if entry.size > 0]
        how(chance.choice(files), chance)
        lab.damaged.add(newest[0].saved_at)
    return kill_rank(lab, chance)


def flip_a_bit(file: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def cut_short(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


Fault = Callable[[Lab, random.Random], bool]
DRIVER = "SIGKILL of the driver"
FAULTS: dict[str, Fault] = {
    "SIGKILL of a rank": kill_rank,
    "SIGKILL of a rank in a save": kill_rank_in_a_save,
    "SIGKILL of the launcher": kill_launcher,
    "SIGKILL of the worker": kill_worker,
    "SIGSTOP of a rank": stop_rank,
    "SIGTERM to the worker": preempt,
    "SIGUSR2 and SIGTERM to the worker": reach_the_limit,
    DRIVER: kill_driver,
    "bit flip in the newest checkpoint": lambda lab, chance: damage(lab, chance, flip_a_bit),
    "newest checkpoint cut short": lambda lab, chance: damage(lab, chance, cut_short),
}


# ---- the campaign ---------------------------------------------------------------------------------------------------


@dataclass
class FaultSequence:
    """A training of ``faulty`` to its end, with one fault after the other."""

    lab: Lab
    chance: random.Random
    faults: int
    gap: int
    """Mean steps between faults."""
    until: float
    """Unix time after which nothing is done to the training any more."""
    done: list[dict[str, Any]] = field(default_factory=list)
    stopped_by_itself: int = 0
    """Times the driver gave up and a person would have had to start it again; the claim is none."""

    def run(self) -> None:
        """Until the training is over."""
        driver = self.lab.shardmake("train")
        idle, before = 0, 0
        while driver.poll() is None or not self.lab.rundir.train_receipt.exists():
            if driver.poll() is not None:
                self.stopped_by_itself += 1
                driver = self.lab.shardmake("train")
            resumed = self._first_step(driver)
            idle = 0 if self.lab.newest() > before else idle + 1
            before = self.lab.newest()
            target = resumed + self.chance.randint(1, 2 * self.gap - 1)
            if idle >= 2:
                target = max(target, before + EVERY + 2)
            if len(self.done) >= self.faults or time.time() > self.until or not self._reach(driver, target):
                driver.wait()
                continue
            driver = self._strike(driver)

    def _first_step(self, driver: subprocess.Popen[str]) -> int:
        """Wait for a step of the present attempt; where it started."""
        self._wait(driver, lambda: self._is_training() and self.lab.step() > 0)
        attempt = self.lab.attempt()
        resume = attempt.read().resume_from if attempt else None
        return int(resume.rpartition("-")[2]) if resume else 0

    def _is_training(self) -> bool:
        attempt = self.lab.attempt()
        return bool(attempt and not attempt.exits() and any(beat.phase == "train" for beat in self.lab.beats()))

    def _reach(self, driver: subprocess.Popen[str], step: int) -> bool:
        self._wait(driver, lambda: self.lab.step() >= step)
        return driver.poll() is None and not self.lab.rundir.train_receipt.exists()

    def _wait(self, driver: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
        while driver.poll() is None and not self.lab.rundir.train_receipt.exists() and not condition():
            time.sleep(0.02)

    def _strike(self, driver: subprocess.Popen[str]) -> subprocess.Popen[str]:
        """One fault, until the training makes steps again; it is recorded with what it cost."""
        name = self.chance.choice([*FAULTS, DRIVER, DRIVER])  # it costs the least time
        attempt, started = self.lab.attempt(), time.time()
        assert attempt
        try:
            goes_on = FAULTS[name](self.lab, self.chance)
        except (psutil.NoSuchProcess, ProcessLookupError, IndexError, FileNotFoundError):
            return driver  # the training ended, or an earlier fault was still at work
        step = self.lab.step()
        if goes_on:
            driver.kill()
            driver.wait()
            driver = self.lab.shardmake("train")
            time.sleep(1)
        else:
            self._wait(driver, lambda: self._is_newer(attempt))
        newest = self.lab.newest()
        resumed = self._first_step(driver)
        fault = {"fault": name, "step": step, "resumed_from": step if goes_on else resumed, "newest": newest}
        if not goes_on and driver.poll() is None and not self.lab.rundir.train_receipt.exists():
            self._wait(driver, lambda: self.lab.step() >= step)
        self.done.append(fault | {"seconds": time.time() - started})
        print(f"{len(self.done):4}  {json.dumps(self.done[-1])}", flush=True)
        return driver

    def _is_newer(self, attempt: AttemptDir) -> bool:
        newest = self.lab.attempt()
        return bool(newest and newest.root != attempt.root and newest.settings.exists())


def corrupted(lab: Lab) -> list[str]:
    """Checkpoints whose record says that they count, that nobody damaged, and that are not whole."""
    sealed = list(store.committed(lab.rundir.checkpoints))
    return [path.name for record, path in sealed if record.saved_at not in lab.damaged and find_problems(path)]


def same_end(baseline: Lab, faulty: Lab) -> bool:
    """Return whether the last checkpoints of both runs hold the same tensors."""
    import torch
    from safetensors.torch import load_file

    from shardmake.consolidate.merge import consolidate

    models = []
    for lab in (baseline, faulty):
        checkpoint = next(store.committed(lab.rundir.checkpoints))[1]
        out = lab.root / f"model-{lab.name}"
        consolidate(checkpoint, out, base=lab.root / "inputs/base", dtype="keep", max_shard_size="5GB", workers=1)
        models.append(load_file(out / "model.safetensors"))
    return all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def campaign(root: Path, faults: int, seed: int, strategy: str, gap: int, minutes: float) -> dict[str, Any]:
    """Run both trainings and compare them."""
    steps = faults * gap
    configure(root, strategy, steps)
    baseline, faulty = Lab(root, "baseline"), Lab(root, "faulty")
    started = time.time()
    assert baseline.shardmake("train").wait() == 0
    undisturbed = time.time() - started
    started = time.time()
    sequence = FaultSequence(faulty, random.Random(seed), faults, gap, started + minutes * 60)
    sequence.run()
    history = json.loads((faulty.rundir.attempts / "index.json").read_text())
    expected, found = baseline.losses(), faulty.losses()
    compared = expected.keys() & found.keys()
    return {
        "strategy": strategy,
        "seed": seed,
        "steps": steps,
        "steps_between_checkpoints": EVERY,
        "faults": len(sequence.done),
        "faults_by_kind": dict(Counter(fault["fault"] for fault in sequence.done)),
        "ends_by_kind": dict(Counter(record["end"] for record in history)),
        "finished": faulty.rundir.train_receipt.exists(),
        "submissions": len(history),
        "times_a_person_was_needed": sequence.stopped_by_itself,
        "steps_done_again": sum(max(0, fault["step"] - fault["resumed_from"]) for fault in sequence.done),
        "largest_loss_of_steps": max((fault["step"] - fault["resumed_from"] for fault in sequence.done), default=0),
        "seconds_undisturbed": round(undisturbed, 1),
        "seconds_with_faults": round(time.time() - started, 1),
        "checkpoints_damaged_on_purpose": len(faulty.damaged),
        "checkpoints_corrupted": len(corrupted(faulty)),
        "checkpoints_lost": sum(
            fault["resumed_from"] < fault["newest"] for fault in sequence.done if fault["fault"] != DRIVER
        ),
        "losses_compared": len(compared),
        "largest_difference_of_losses": max(abs(expected[step] - found[step]) for step in compared),
        "last_checkpoints_equal": same_end(baseline, faulty),
        "rows": sequence.done,
    }


def keep(result: dict[str, Any], file: Path) -> None:
    """Put the campaign into the results, in place of an equal one, and add all of them up."""
    known = json.loads(file.read_text())["campaigns"] if file.exists() else []
    same = ("strategy", "seed", "steps")
    campaigns = [each for each in known if any(each[key] != result[key] for key in same)] + [result]
    file.write_text(json.dumps({"all": totals(campaigns), "campaigns": campaigns}, indent=2) + "\n")


def totals(campaigns: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over all campaigns, and the worst of each."""
    summed = ("faults", "submissions", "times_a_person_was_needed", "steps_done_again", "checkpoints_corrupted")
    found: dict[str, Any] = {key: sum(each[key] for each in campaigns) for key in (*summed, "checkpoints_lost")}
    found["all_finished"] = all(each["finished"] for each in campaigns)
    found["all_last_checkpoints_equal"] = all(each["last_checkpoints_equal"] for each in campaigns)
    for key in ("largest_loss_of_steps", "largest_difference_of_losses"):
        found[key] = max(each[key] for each in campaigns)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder to work in; must not exist")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gap", type=int, default=12, help="mean steps between faults")
    parser.add_argument("--minutes", type=float, default=120.0, help="no more faults after so long")
    parser.add_argument("--strategy", default="zero2")
    parser.add_argument("--keep", action="store_true", help="leave the folder")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    result = campaign(
        arguments.work, arguments.faults, arguments.seed, arguments.strategy, arguments.gap, arguments.minutes
    )
    print(json.dumps(result, indent=2))
    keep(result, arguments.results)
    if not arguments.keep:
        shutil.rmtree(arguments.work)


if __name__ == "__main__":
    main()
