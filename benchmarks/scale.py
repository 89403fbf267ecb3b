"""File operations of 64 to 16,384 ranks, by simulation: ``python -m benchmarks.scale``.

The real code of saving, resuming, heartbeats, the analysis of a hang, the end of a job, the rendezvous and the network
check runs for every node of a job, in the threads of one process. The files are small, the process group and the store
are fake, and every operation on a file is counted. Seconds are not measured: they follow from the counts and `Rates`.
"""

import argparse
import io
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.counting import PLACE, FakeGroup, NodePool, OperationCounter, run_on_nodes
from benchmarks.machine import machine
from shardmake.checkpoint import node_files, record, store
from shardmake.checkpoint.record import RECORD_NAME
from shardmake.checkpoint.store import Retention
from shardmake.launch import rendezvous, watchdog, worker
from shardmake.launch.resume_validation import validate_share
from shardmake.launch.watchdog import Watchdog
from shardmake.run.attempt import Attempt, AttemptDir, Heartbeat, NodeExit, heartbeat_file
from shardmake.train import checkpoint_saver, network_check
from shardmake.train.checkpoint_saver import Saver

RESULTS = Path(__file__).parent / "results/scale.json"
SIZES = (64, 512, 2048, 16384)
RANKS_PER_NODE = 8
STACK = 'File "torch/distributed/distributed_c10d.py", line 1 in all_reduce\n'


@dataclass(frozen=True)
class Rates:
    """The speeds of a cluster; the defaults are this benchmark's assumptions."""

    operations: float = 10_000
    """Metadata operations per second that the shared file system serves for all nodes together."""
    latency: float = 0.001
    """Seconds that one node waits for one operation."""
    storage: float = 50e9
    """Bytes per second that the shared file system reads for all nodes together; the save's own writes are not here."""
    login: float = 2e9
    """Bytes per second that the login node reads."""
    network: float = 1e9
    """Bytes per second that a rank receives in a gather of objects."""
    checkpoint: float = 4e9
    """Bytes of a checkpoint per rank."""


@dataclass(frozen=True)
class Phase:
    """The cost of one phase."""

    name: str
    ranks: int
    operations: int
    """On the shared file system, of all nodes."""
    busiest: int
    """Those of the busiest node."""
    received: int = 0
    """Bytes that one rank receives in collectives, or operations on the store of all ranks."""
    login: float = 0
    """Bytes that the login node reads."""
    storage: float = 0
    """Bytes that all nodes together read from storage."""
    every: float = 0
    """Seconds between two such phases; 0 for one that happens once."""

    def waiting_seconds(self, rates: Rates) -> float:
        """Return how long the operations take: the file system serves all nodes, and the busiest one waits for each."""
        return max(self.operations / rates.operations, self.busiest * rates.latency)

    def seconds(self, rates: Rates) -> float:
        """Return how long the phase takes, with the bytes that it reads and receives."""
        reading = self.login / rates.login + self.storage / rates.storage
        return self.waiting_seconds(rates) + reading + self.received / rates.network


def describe(step: int) -> dict[str, Any]:
    """Return the content of a record."""
    return {"tokens": step, "world_size": 1, "strategy": "fsdp", "attempt": 1, "settings_digest": "r"}


def write_shards(folder: Path, node: int) -> None:
    """Write what the ranks of ``node`` write of a checkpoint under FSDP, with one byte instead of gigabytes each.

    The states of the random generators are real: the validation reads which classes they name.
    """
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "optimizer").mkdir(exist_ok=True)
    for rank in range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE):
        (folder / f"model/__{rank}_0.distcp").write_bytes(b"x")
        (folder / f"optimizer/__{rank}_0.distcp").write_bytes(b"x")
        (folder / f"rng_state_{rank}.pth").write_bytes(generator_state())


@cache
def generator_state() -> bytes:
    """Return the content of a file with the state of a random generator."""
    content = io.BytesIO()
    torch.save({"cpu": torch.get_rng_state()}, content)
    return content.getvalue()


def save(folder: Path, ranks: int) -> Phase:
    """Count one save without the writes of the shards themselves."""
    nodes = ranks // RANKS_PER_NODE
    group, counter = FakeGroup(nodes, RANKS_PER_NODE), OperationCounter(folder)

    def run(node: int) -> None:
        with Saver(folder / "checkpoints", describe, Retention()).saving(2, required=True) as target:
            assert target is not None
            with counter.paused():
                write_shards(target, node)

    replaced: dict[str, Any] = group.replacements() | {"library_versions": dict}
    pool = patch.object(node_files, "ThreadPoolExecutor", NodePool)
    with patch.multiple(checkpoint_saver, **replaced), pool, counter.counting():
        run_on_nodes(nodes, run)
    return Phase("save", ranks, counter.total, counter.busiest, received=group.received)


def resume(folder: Path, ranks: int) -> Phase:
    """Count what the login node does to choose the checkpoint that `save` has written: it compares sizes."""
    counter = OperationCounter(folder)
    with counter.counting():
        assert store.recover(folder / "checkpoints", checksums=False) is not None
    return Phase("resume", ranks, counter.total, counter.busiest)


def validate(attempt: AttemptDir, ranks: int, rates: Rates) -> Phase:
    """Count the validation of that checkpoint by the job's nodes, each of which reads its share and the record.

    The first 32 nodes are run, and the others counted as their mean: the shares differ by one file at most.
    """
    checkpoints = attempt.root.parents[2] / "checkpoints"
    (_, checkpoint), settings = next(store.committed(checkpoints)), attempt.read()
    settings = settings.model_copy(update={"resume_from": str(checkpoint)})
    counter = OperationCounter(checkpoint)
    with patch.object(record, "ThreadPoolExecutor", NodePool), counter.counting():
        for PLACE.node in range(run := min(settings.nodes, 32)):
            validate_share(settings, PLACE.node, lambda _: None)
    records = settings.nodes * (checkpoint / RECORD_NAME).stat().st_size
    storage = rates.checkpoint * ranks + records
    return Phase("validate", ranks, counter.total * settings.nodes // run, counter.busiest, storage=storage)


def heartbeats(attempt: AttemptDir, ranks: int) -> Phase:
    """Count one look of every node's worker, which also copies its ranks' heartbeats; those are on the node."""
    counter = OperationCounter(attempt.root)
    dogs = [_watchdog(attempt, node, ranks) for node in range(ranks // RANKS_PER_NODE)]
    with counter.counting():
        for PLACE.node, dog in enumerate(dogs):
            assert not dog.has_hung() and not dog.is_abandoned() and not attempt.is_superseded()
    return Phase("heartbeats", ranks, counter.total, counter.busiest, every=worker.WATCH_SECONDS)


def hang(attempt: AttemptDir, ranks: int) -> Phase:
    """Count the analysis of a hang; the stacks themselves are there already."""
    counter = OperationCounter(attempt.root)
    dogs = [_watchdog(attempt, node, ranks) for node in range(ranks // RANKS_PER_NODE)]
    attempt.stacks.mkdir()
    for rank in range(ranks):
        attempt.stack(rank).write_text("" if rank == 5 else STACK)
    silent: dict[str, Any] = {"_dump_stacks": lambda *_: None, "request_dump": lambda *_: False}
    silent |= dict.fromkeys(("_ANSWER_SECONDS", "_OTHER_NODES_SECONDS", "ANALYSIS_SECONDS"), 0)
    with patch.multiple(watchdog, **silent), counter.counting():
        for node in range(len(dogs) - 1, -1, -1):
            PLACE.node = node
            dogs[node].missed = dogs[node]._beat(0) if node == 0 else None
            dogs[node].collect(attempt.root, attempt.root)
    found = attempt.read_hang()
    assert found is not None and found.rank == 5, found
    return Phase("hang", ranks, counter.total, counter.busiest)


def failure(attempt: AttemptDir, ranks: int) -> Phase:
    """Count one look of every worker at the others after all have failed; each looks once a second for up to 120 s."""
    nodes, counter = ranks // RANKS_PER_NODE, OperationCounter(attempt.root)
    for node in range(nodes):
        record = NodeExit(
            node_rank=node, host="c", started=0, ended=1, phase="training", returncode=1, stop_signal=None
        )
        attempt.exit_record(node).write_text(record.model_dump_json())
    with counter.counting():
        for PLACE.node in range(nodes):
            _watchdog(attempt, PLACE.node, ranks).is_abandoned()
            assert worker._all_nodes_exited(attempt)
    return Phase("failure", ranks, counter.total, counter.busiest)


def meet(folder: Path, ranks: int) -> Phase:
    """Count the rendezvous of a job whose first node publishes its address 2 s after the others have started."""
    nodes, counter = ranks // RANKS_PER_NODE, OperationCounter(folder)
    folder.mkdir()

    def run(node: int) -> None:
        if node == 0:
            time.sleep(2)
        rendezvous.run_rendezvous(folder, 0, node, nodes, None, 3600)  # threads of a loaded machine

    with patch.object(rendezvous, "choose_address", lambda *_, **__: ("lo", "127.0.0.1")), counter.counting():
        run_on_nodes(nodes, run)
    return Phase("rendezvous", ranks, counter.total, counter.busiest)


class FakeStore:
    """A store that counts the keys of each request; nothing waits."""

    def __init__(self, present: set[str]) -> None:
        self.values = dict.fromkeys(present, "")
        self.numbers: Counter[str] = Counter()
        self.keys = 0

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        self.keys += len(keys)
        return all(key in self.values for key in keys)

    def add(self, key: str, number: int) -> int:
        """Add to a number and return it."""
        self.keys += 1
        self.numbers[key] += number
        return self.numbers[key]

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self.keys += 1
        self.values[key] = value

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Fail if a key is missing, because no other thread will set it."""
        assert self.check(keys)

    def get(self, key: str) -> str:
        """Return the value of a key."""
        self.keys += 1
        return self.values[key]


def absent_rank(ranks: int) -> Phase:
    """Count the keys that the ranks ask for when one of them did not join the network check."""
    fake = FakeStore({f"joined-{rank}" for rank in range(ranks) if rank != 5})
    fake.add("joined", ranks - 1)
    asked = []
    for _ in range(ranks - 1):
        before = fake.keys
        found = network_check._explain(TimeoutError("timed out"), fake, ranks)
        assert "Rank 5 did not join" in str(found)
        asked.append(fake.keys - before)
    return Phase("absent rank", ranks, sum(asked), sum(asked[:RANKS_PER_NODE]))


def _watchdog(attempt: AttemptDir, node: int, ranks: int) -> Watchdog:
    """Return the watchdog of a node whose ranks have heartbeats on the node."""
    first = node * RANKS_PER_NODE
    local = attempt.root.parents[2] / "scratch" / f"node-{node}"
    local.mkdir(parents=True, exist_ok=True)
    for rank in range(first, first + RANKS_PER_NODE):
        beat = Heartbeat(rank=rank, host=f"c{node}", pid=0, phase="train", step=3, time=time.time())
        heartbeat_file(local, rank).write_text(beat.model_dump_json())
    return Watchdog(attempt, range(first, first + RANKS_PER_NODE), ranks, 600, local)


def measure(ranks: int, rates: Rates) -> list[Phase]:
    """Return the counts of all phases with this number of ranks."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        root = Path(folder)
        attempt = AttemptDir(root / "train/attempts/001")
        attempt.root.mkdir(parents=True)
        settings: dict[str, Any] = dict.fromkeys(("run_folder", "scratch", "settings_digest"), "")
        Attempt(
            number=1, nodes=ranks // RANKS_PER_NODE, processes_per_node=RANKS_PER_NODE, cpus_per_node=8,
            accelerator="cpu", network_interface=None, offline=True, resume_from=None, versions={}, **settings,
        ).write(attempt.settings)  # fmt: skip
        steps: list[Callable[[], Phase]] = [
            lambda: save(root, ranks), lambda: resume(root, ranks), lambda: validate(attempt, ranks, rates),
            lambda: heartbeats(attempt, ranks), lambda: hang(attempt, ranks), lambda: failure(attempt, ranks),
            lambda: meet(root / "rendezvous", ranks), lambda: absent_rank(ranks),
        ]  # fmt: skip
        return [step() for step in steps]


def main() -> None:
    """Print a row per phase and size, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of ranks, multiples of 8")
    parser.add_argument("--operations", type=float, default=Rates.operations, help="metadata operations per second")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rates, rows = Rates(operations=arguments.operations), []
    print(f"{'ranks':>6} {'phase':<12} {'operations':>11} {'per rank':>9} {'busiest node':>13} {'bytes':>9} {'s':>8}")
    for ranks in arguments.sizes:
        for phase in measure(ranks, rates):
            seconds = phase.seconds(rates)
            waiting = phase.waiting_seconds(rates)
            rows.append(asdict(phase) | {"waiting_seconds": round(waiting, 3), "seconds": round(seconds, 3)})
            print(
                f"{ranks:>6} {phase.name:<12} {phase.operations:>11,} {phase.operations / ranks:>9.1f} "
                f"{phase.busiest:>13,} {phase.received + phase.login + phase.storage:>9.2g} {seconds:>8.2f}",
                flush=True,
            )
    arguments.results.write_text(
        json.dumps({"phases": rows, "assumed": asdict(rates), "machine": machine()}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
