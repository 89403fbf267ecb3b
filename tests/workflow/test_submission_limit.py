"""Two real drivers of one user, with programs that keep a queue in Slurm's place; no job ever starts."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from shardmake.launch.watcher import WAITED_VARIABLE
from tests.programs import install_programs
from tests.workflow.checkout import UNPUSHED, Checkout, wait_for

TOOLS = {
    "srun": "exit 1",
    "sinfo": "echo 'gpu*|3|2|8000|infinite|(null)|(null)'",
    "scontrol": "exit 1",
    "sbatch": """
        case "$*" in *--test-only*) exit 0 ;; esac
        name=$(sed -n 's/^#SBATCH --job-name=//p' "$1")
        id=$(($(wc -l < $QUEUE) + 1))
        echo "$id $name" >> $QUEUE
        echo "Submitted batch job $id"
    """,
    "squeue": """
        for word; do
            case $word in --name=*) wanted=${word#--name=} ;; esac
        done
        while read -r id name; do
            [ "${wanted:-$name}" = "$name" ] || continue
            echo "$id|PENDING||$name"
        done < $QUEUE
    """,
}


@dataclass
class QueuedRuns:
    """A user's checkout with two planned runs, ``one`` and ``two``; the limit is one training in the queue."""

    checkout: Checkout
    folder: Path
    drivers: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def queue(self) -> list[str]:
        return (self.folder / "queue").read_text().splitlines()

    def train(self, run: str, **variables: str) -> Path:
        log = self.folder / f"{run}-{len(self.drivers)}.log"
        command = self.checkout.command("shardmake", "train", run, "--config", str(self.folder / "config.yaml"))
        driver = subprocess.Popen(
            [*command, "--runs", str(self.folder / "runs")], cwd=self.checkout.root, env={**os.environ, **variables},
            stdout=log.open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.drivers.append(driver)
        return log

    def interrupt(self, number: int) -> None:
        """End a driver as Ctrl-C does."""
        self.drivers[number].send_signal(signal.SIGINT)
        self.drivers[number].wait(60)


@pytest.fixture
def runs(shared_checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[QueuedRuns]:
    (tmp_path / "queue").touch()
    tools = {name: f"QUEUE={tmp_path}/queue\n{script}" for name, script in TOOLS.items()}
    install_programs(tmp_path / "bin", monkeypatch, tools, os.environ["PATH"])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    cluster = yaml.safe_load((shared_checkout.root / "config/cluster.yaml").read_text())
    cluster |= {"executor": "slurm", "trainings_per_user": 1, "slurm": {"gpu_request": "none"}}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    config = {"cluster": str(tmp_path / "cluster.yaml"), "runs": {"one": UNPUSHED, "two": UNPUSHED}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    one, two = (tmp_path / "runs" / run for run in ("one", "two"))
    shutil.copytree(shared_checkout.run, one, ignore=shutil.ignore_patterns("train"))
    for stage in ("plan", "render"):
        shared_checkout("shardmake", stage, "one", "--config", str(tmp_path / "config.yaml"), "--runs", str(one.parent))
    shutil.copytree(one, two)
    runs = QueuedRuns(shared_checkout, tmp_path)
    yield runs
    for driver in runs.drivers:
        driver.kill()
        driver.wait()


def wait_for_text(log: Path, text: str) -> None:
    wait_for(lambda: text in log.read_text(), 120)


def test_two_drivers_submit_one_training_at_a_time(runs: QueuedRuns) -> None:
    """One of two drivers submits; a driver adopts its queued job although the queue is full."""
    logs = {run: runs.train(run) for run in ("one", "two")}
    wait_for(lambda: runs.queue)
    first, second = sorted(logs, key=lambda run: run not in runs.queue[0])
    wait_for_text(logs[first], "Attempt 1: job 1")
    wait_for_text(logs[second], f"{second} waits: you have 1 training in the queue ({first})")
    assert len(runs.queue) == 1
    runs.interrupt(list(logs).index(first))
    assert "the driver exits, job 1 keeps running" in logs[first].read_text()
    wait_for_text(runs.train(first), "Adopting job 1 (attempt 1)")
    runs.interrupt(2)

    runs.interrupt(list(logs).index(second))
    assert "no job was submitted" in logs[second].read_text() and len(runs.queue) == 1
    (runs.folder / "queue").write_text("")
    stop_file = runs.folder / f"runs/{second}/train/STOP"
    stop_file.touch()
    restarted = runs.train(second, **{WAITED_VARIABLE: "1"})
    assert runs.drivers[-1].wait(60) == 3
    assert "somebody created" in restarted.read_text() and "No job was submitted" in restarted.read_text()
    assert not runs.queue
    wait_for_text(runs.train(second), "Attempt 1: job 1")
    assert not stop_file.exists() and second in runs.queue[0]
