"""Two users of a lab run the workflow at the same time, on one checkout and one cache."""

import contextlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from tests.cluster.harness import Cluster
from tests.cluster.users import LAB_ID, User, accounts, command_as
from tests.hub import READER
from tests.workflow.checkout import REPOSITORY, RUN, Checkout

pytestmark = [pytest.mark.cluster, pytest.mark.training]
HUB = """
import sys, time
from pathlib import Path
from tests.hub import FakeHub
with FakeHub(Path(sys.argv[1])) as hub:
    hub.add("lab/base", {path.name: path.read_bytes() for path in Path(sys.argv[2]).iterdir()})
    print(hub.url, flush=True)
    sys.stdin.read()
"""


@dataclass
class Lab:
    """The checkout that both work in."""

    checkout: Checkout
    cluster: Cluster
    hub: str

    def start(self, user: User, *words: str) -> "subprocess.Popen[str]":
        """Start a command of ``user`` on the login node, in the checkout."""
        variables = {"HF_ENDPOINT": self.hub, "HF_TOKEN": READER}
        return self.cluster.popen(
            command_as(user, self.checkout.command(*words), variables),
            cwd=self.checkout.root,
            env={"OMP_NUM_THREADS": "1"},
            stdout=(user.home / "output.txt").open("w"),
        )

    def run(self, user: User, *words: str) -> tuple[int, str]:
        """Exit status and output of a command of ``user``."""
        status = self.start(user, *words).wait(timeout=400)
        output = (user.home / "output.txt").read_text()
        print(f"{user.name}$ {' '.join(words)}\n{output}")
        return status, output

    def ask_to_stop(self, user: User, run: str) -> None:
        """Create a run's stop file as ``user``."""
        self.cluster.run(command_as(user, ["touch", f"runs/{run}/train/STOP"], {}), cwd=self.checkout.root)


@pytest.fixture
def users(cluster: Cluster) -> Iterator[list[User]]:
    cluster.reset()
    with accounts(cluster, ["ada", "bob"]) as found:
        yield found


@pytest.fixture
def lab(cluster: Cluster, shared_folder: Path, users: list[User], inputs: Path) -> Iterator[Lab]:
    """A checkout that the group may write, as an administrator leaves it: setgid folders."""
    shared_folder.chmod(0o755)
    checkout = Checkout.create(shared_folder / "checkout", inputs)
    cluster_file = yaml.safe_load((REPOSITORY / "config/clusters/three-node-test.yaml").read_text())
    shares = {"shared": True, "cache": "cache", "processes_per_node": 1}
    (checkout.root / "config/cluster.yaml").write_text(yaml.safe_dump(cluster_file | shares))
    run = RUN | {"model": "lab/base", "nodes": 1, "precision": "fp32", "global_batch_size": 4}
    endless = run | {"max_steps": 5000, "checkpoints": {"every_steps": 4000}}
    checkout.write_config({"cluster": "config/cluster.yaml", "runs": {"long": endless, "short": run}})
    profile = checkout.root / "profiles/slurm/config.yaml"
    waits = {"slurm-init-seconds-before-status-checks": 2, "latency-wait": 5}
    profile.write_text(yaml.safe_dump(yaml.safe_load(profile.read_text()) | waits))
    for path in [checkout.root, *checkout.root.rglob("*")]:
        os.chown(path, 0, LAB_ID, follow_symlinks=False)
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o2775)
    words = [sys.executable, "-c", HUB, str(shared_folder / "hub"), str(checkout.root / "resources/demo/base")]
    server = subprocess.Popen(
        cluster.command(words, cwd=REPOSITORY), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout
    yield Lab(checkout, cluster, server.stdout.readline().strip())
    server.communicate()


@pytest.mark.two_users
def test_both_at_once_on_one_checkout_and_one_cache(lab: Lab, users: list[User]) -> None:
    ada, bob = users
    long, short = (lab.checkout.root / "runs" / name for name in ("long", "short"))
    snakemake = ("snakemake", "--profile", "slurm")
    adas = lab.start(ada, *snakemake, "runs/long/train/receipt.json")
    status, output = lab.run(bob, *snakemake, "runs/short/model/receipt.json")
    assert status == 0, output
    assert adas.poll() is None, (ada.home / "output.txt").read_text()

    assert_shared(lab.checkout.root)
    paths = {json.loads((run / "sources.json").read_text())["model"]["path"] for run in (long, short)}
    assert len(paths) == 1 and Path(paths.pop()).is_relative_to(lab.checkout.root / "cache")

    lab.cluster.wait_until(lambda: (long / "train/metrics.jsonl").exists(), "ada's training", timeout=200)
    assert owners(lab) == {"ada"}
    status, output = lab.run(bob, "shardmake", "status", "long")
    assert status == 0 and "Training is under way" in output
    status, output = lab.run(bob, "shardmake", "train", "long")
    assert status == 2 and "Another driver is already watching long" in output

    kill_all_of(adas.pid)
    status, output = lab.run(bob, "shardmake", "train", "long")
    assert status == 2 and "of ada. You cannot adopt it" in output
    assert "touch runs/long/train/STOP" in output and owners(lab) == {"ada"}

    lab.ask_to_stop(bob, "long")
    lab.cluster.wait_until(lambda: not owners(lab), "the end of ada's job", timeout=100)
    attempt = long / "train/attempts/001"
    assert (attempt / "stopped.json").exists() and len(list((long / "train/checkpoints").iterdir())) == 1
    status, output = lab.run(ada, "shardmake", "train", "long")
    assert status == 2 and "saved and stopped" in output

    set_nodes(lab, "drain")
    driver = lab.start(ada, "shardmake", "train", "long")
    lab.cluster.wait_until(lambda: bool(dozing(driver.pid)), "a driver that dozes", timeout=100)
    assert dozing(driver.pid)[0].memory_full_info().pss < 8 << 20
    status, output = lab.run(bob, "shardmake", "train", "long")
    assert status == 2 and "Another driver is already watching long" in output
    set_nodes(lab, "resume")
    attempt = long / "train/attempts/002"
    lab.cluster.wait_until(lambda: (attempt / "node-0.log").exists(), "the second attempt", timeout=100)
    lab.ask_to_stop(bob, "long")
    assert driver.wait(timeout=100) == 2
    output = (ada.home / "output.txt").read_text()
    assert "resuming from checkpoint" in output and "waits in low memory until it starts" in output
    assert "saved and stopped" in output and (attempt / "stopped.json").exists()
    assert_shared(lab.checkout.root)


def set_nodes(lab: Lab, state: str) -> None:
    lab.cluster.run(["scontrol", "update", "nodename=c[1-3]", f"state={state}", "reason=test"])


def dozing(pid: int) -> list[psutil.Process]:
    """Dozing drivers among the descendants of a process."""
    root = psutil.Process(pid)
    return [one for one in [root, *root.children(recursive=True)] if is_dozing(one)]


def is_dozing(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # one that ends meanwhile
        return "low_memory_wait.py" in " ".join(process.cmdline())
    return False


def owners(lab: Lab) -> set[str]:
    """Users who have training jobs."""
    lines = lab.cluster.run(["squeue", "--noheader", "--format=%u %j"]).stdout.splitlines()
    return {line.split()[0] for line in lines if "shardmake-" in line}


def kill_all_of(pid: int) -> None:
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        process.kill()


def assert_shared(root: Path) -> None:
    """Whatever Shardmake wrote for either, the group reads and writes; the stop file is touched by hand."""
    for folder in ("runs", "logs", "cache", ".snakemake"):
        for path in [root / folder, *(root / folder).rglob("*")]:
            if path.is_symlink() or not path.exists() or path.name == "STOP":
                continue
            found = path.stat()
            wanted = stat.S_IRGRP | stat.S_IWGRP | (stat.S_ISGID if path.is_dir() else 0)
            assert found.st_gid == LAB_ID and found.st_mode & wanted == wanted, f"{path} {stat.filemode(found.st_mode)}"
