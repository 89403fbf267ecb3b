"""Two users of a group run the workflow at the same time, on one checkout and one cache."""

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
from tests.cluster.users import GROUP_ID, User, accounts, command_as
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
class SharedCheckout:
    checkout: Checkout
    cluster: Cluster
    hub: str

    def start(self, user: User, *words: str) -> "subprocess.Popen[str]":
        """Start a command of ``user`` on the login node, in the checkout."""
        variables = {"HF_ENDPOINT": self.hub, "HF_TOKEN": READER}
        return self.cluster.popen(
            command_as(user, self.checkout.command(*words), variables), cwd=self.checkout.root,
            env={"OMP_NUM_THREADS": "1"}, stdout=(user.home / "output.txt").open("w"),
        )  # fmt: skip

    def run(self, user: User, *words: str) -> tuple[int, str]:
        """Return the exit status and the output of a command of ``user``."""
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
def shared(cluster: Cluster, shared_folder: Path, users: list[User], inputs: Path) -> Iterator[SharedCheckout]:
    """Create a checkout that the group may write, with setgid folders, as an administrator would."""
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
        os.chown(path, 0, GROUP_ID, follow_symlinks=False)
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o2775)
    words = [sys.executable, "-c", HUB, str(shared_folder / "hub"), str(checkout.root / "resources/demo/base")]
    server = subprocess.Popen(
        cluster.command(words, cwd=REPOSITORY), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout
    yield SharedCheckout(checkout, cluster, server.stdout.readline().strip())
    server.communicate()


@pytest.mark.two_users
def test_both_at_once_on_one_checkout_and_one_cache(shared: SharedCheckout, users: list[User]) -> None:
    ada, bob = users
    long, short = (shared.checkout.root / "runs" / name for name in ("long", "short"))
    snakemake = ("snakemake", "--profile", "slurm")
    adas = shared.start(ada, *snakemake, "runs/long/train/receipt.json")
    status, output = shared.run(bob, *snakemake, "runs/short/model/receipt.json")
    assert status == 0, output
    assert adas.poll() is None, (ada.home / "output.txt").read_text()

    assert_shared(shared.checkout.root)
    paths = {json.loads((run / "sources.json").read_text())["model"]["path"] for run in (long, short)}
    assert len(paths) == 1 and Path(paths.pop()).is_relative_to(shared.checkout.root / "cache")

    shared.cluster.wait_until(lambda: (long / "train/metrics.jsonl").exists(), "ada's training", timeout=200)
    assert owners(shared) == {"ada"}
    status, output = shared.run(bob, "shardmake", "status", "long")
    assert status == 0 and "Training: step" in output
    status, output = shared.run(bob, "shardmake", "train", "long")
    assert status == 2 and "Another driver is already watching long" in output

    kill_with_descendants(adas.pid)
    status, output = shared.run(bob, "shardmake", "train", "long")
    assert status == 2 and "of ada. You cannot adopt it" in output
    assert "touch runs/long/train/STOP" in output and owners(shared) == {"ada"}

    shared.ask_to_stop(bob, "long")
    shared.cluster.wait_until(lambda: not owners(shared), "the end of ada's job", timeout=100)
    attempt = long / "train/attempts/001"
    assert (attempt / "stopped.json").exists() and len(list((long / "train/checkpoints").iterdir())) == 1

    set_nodes(shared, "drain")
    driver = shared.start(ada, "shardmake", "train", "long")
    shared.cluster.wait_until(lambda: bool(waiting(driver.pid)), "a driver that waits", timeout=100)
    assert waiting(driver.pid)[0].memory_full_info().pss < 8 << 20
    status, output = shared.run(bob, "shardmake", "train", "long")
    assert status == 2 and "Another driver is already watching long" in output
    set_nodes(shared, "resume")
    attempt = long / "train/attempts/002"
    shared.cluster.wait_until(lambda: (attempt / "node-0.log").exists(), "the second attempt", timeout=100)
    shared.ask_to_stop(bob, "long")
    assert driver.wait(timeout=100) == 3
    output = (ada.home / "output.txt").read_text()
    assert "saved and stopped" in output and "This command resumes it." in output, "bob's request"
    assert "resuming from checkpoint" in output and "The job is pending" in output
    assert output.count("saved and stopped") == 2 and (attempt / "stopped.json").exists()
    assert_shared(shared.checkout.root)


def set_nodes(shared: SharedCheckout, state: str) -> None:
    shared.cluster.run(["scontrol", "update", "nodename=c[1-3]", f"state={state}", "reason=test"])


def waiting(pid: int) -> list[psutil.Process]:
    """Return the drivers that wait in low memory among the descendants of a process."""
    root = psutil.Process(pid)
    return [one for one in [root, *root.children(recursive=True)] if is_waiting(one)]


def is_waiting(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # the process may end meanwhile
        return "watcher.py" in " ".join(process.cmdline())
    return False


def owners(shared: SharedCheckout) -> set[str]:
    """Return the users who have training jobs."""
    lines = shared.cluster.run(["squeue", "--noheader", "--format=%u %j"]).stdout.splitlines()
    return {line.split()[0] for line in lines if "shardmake-" in line}


def kill_with_descendants(pid: int) -> None:
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        process.kill()


def assert_shared(root: Path) -> None:
    """Check that the group can read and write all files, except the stop file, which a user creates."""
    for folder in ("runs", "logs", "cache", ".snakemake"):
        for path in [root / folder, *(root / folder).rglob("*")]:
            if path.is_symlink() or not path.exists() or path.name == "STOP":
                continue
            found = path.stat()
            wanted = stat.S_IRGRP | stat.S_IWGRP | (stat.S_ISGID if path.is_dir() else 0)
            assert found.st_gid == GROUP_ID and found.st_mode & wanted == wanted, f"{path} {found.st_mode:o}"
