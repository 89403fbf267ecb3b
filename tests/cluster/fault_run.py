"""A checkout on the test cluster, commands on its login node, and faults of its trainings by real means."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from shardmake.launch.jobs import job_name
from shardmake.run.attempt import AttemptDir, Heartbeat
from shardmake.run.paths import RunDir
from tests.cluster.harness import Cluster, ClusterError, Job
from tests.cluster.slurm_conf import NODES
from tests.workflow.checkout import REPOSITORY, RUN, Checkout

CHANCE = random.Random(11)


class ClusterCheckout(Checkout):
    """A checkout on the folder that all nodes share, with commands run on the login node."""

    cluster: Cluster

    def configure_cluster(self, slurm: dict[str, object] | None = None, **changes: object) -> None:
        """Configure one run on the cluster of the harness, with ``changes``."""
        file = yaml.safe_load((REPOSITORY / "config/clusters/three-node-test.yaml").read_text())
        file["slurm"] |= slurm or {}
        (self.root / "config/cluster.yaml").write_text(yaml.safe_dump(file))
        run = {"nodes": 2, "precision": "fp32"} | changes
        self.write_config({"cluster": "config/cluster.yaml", "runs": {"demo": RUN | run}})

    def shorten_waits(self) -> None:
        """Wait less than the profile, for one machine's own file system; nothing else differs from it."""
        profile = self.root / "profiles/slurm/config.yaml"
        waits = {"slurm-init-seconds-before-status-checks": 2, "latency-wait": 5}
        profile.write_text(yaml.safe_dump(yaml.safe_load(profile.read_text()) | waits))

    def on_login_node(self, *words: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Return the output of a command on the login node."""
        done = self.cluster.run(self.command(*words), cwd=self.root, check=False, timeout=400, env=env)
        output = f"{done.stdout}{done.stderr}"
        print(f"$ {' '.join(words)}\n{output}")
        assert not check or done.returncode == 0, f"{' '.join(words)} ended with {done.returncode}"
        return output

    def training_jobs(self) -> list[Job]:
        """Return the run's training jobs that Slurm still lists, oldest first."""
        return [job for job in self.cluster.jobs() if job.name == job_name(self.run)]


HOOKS = """
import json, os, re, resource, signal, sys, time
ROOT = os.path.dirname(os.path.abspath(__file__))
held, least = [], []

def take_order(what):
    "Return the text of the test's order of this fault, for one process and one time; None without an order."
    path = os.path.join(ROOT, "orders", what)
    try:
        with open(path) as file:
            text = file.read()
        os.unlink(path)
        return text
    except FileNotFoundError:
        return None

def limit_memory():
    "Limit this process to 8 MiB more than its least from now on; a step of 512 tokens needs many times that."
    (size,) = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData")]
    least[:] = [min([size, *least])]
    resource.setrlimit(resource.RLIMIT_DATA, (least[0] + (8 << 20),) * 2)

def in_rank(event, arguments):
    beat = event == "open" and re.search(r"rank-(\\d+)\\.tmp$", str(arguments[0]))
    if not beat:
        return
    killer = take_order("killer-" + beat[1])
    if killer:
        from tests.kill_at_write import Killer
        Killer(**json.loads(killer)).install()
    try:
        with open(os.path.join(ROOT, "orders", "slow-" + beat[1])) as file:
            time.sleep(float(file.read()))
    except FileNotFoundError:
        pass
    if beat[1] != "1":
        return
    if take_order("memory-limit") or least:
        limit_memory()
    if take_order("raise"):
        raise ValueError("the test ordered this error")
    if take_order("eat"):
        held.append(bytearray(os.urandom(1 << 20) * 1024))
    if take_order("sleep"):
        time.sleep(100000)

def in_driver(event, arguments):
    submits = event == "subprocess.Popen" and "sbatch" in str(arguments[1][0])
    records = event == "open" and ".job.json." in str(arguments[0])
    claims = event == "os.mkdir" and ".next." in str(arguments[0])
    orders = {"kill-before-submit": submits, "kill-before-record": records, "kill-before-claim": claims}
    if any(happens and take_order(order) for order, happens in orders.items()):
        os.kill(os.getpid(), signal.SIGKILL)

def in_stage(event, arguments):
    "Hold the process of a stage when it writes its result."
    results = {"consolidate": "[.]safetensors[.]tmp$", "evaluate": "/[.]evaluation[.]json"}
    writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
    if writes and re.search(results[STAGE], str(arguments[0])) and take_order("hold-" + STAGE):
        time.sleep(100000)

if os.environ.get("READ_IN_JOB"):  # as for a checkpoint that is too large for the driver
    import shardmake.launch.resume
    shardmake.launch.resume.CHEAP_BYTES = 0
STAGE = sys.orig_argv[2] if len(sys.orig_argv) > 2 and sys.orig_argv[1].endswith("/shardmake") else ""
if STAGE in ("consolidate", "evaluate"):
    sys.addaudithook(in_stage)
elif "shardmake.train" in sys.orig_argv:
    sys.addaudithook(in_rank)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        import tests.fsdp_on_cpu
elif sys.orig_argv[-2:-1] == ["train"]:
    sys.addaudithook(in_driver)
elif STAGE or any(os.path.basename(word) == "snakemake" for word in sys.orig_argv[1:3]):  # jobs start it with -m
    import shardmake.plan.refusals  # the ranks make FSDP run without GPUs
    shardmake.plan.refusals.wrong_fsdp = lambda run, cluster: ()
"""


SBATCH = """#!/bin/sh
if seconds=$(cat {root}/orders/late-sbatch 2> /dev/null); then
    rm {root}/orders/late-sbatch
    (sleep $seconds; exec {sbatch} "$@") > /dev/null 2>&1 &
    echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
    exit 1
fi
rm {root}/orders/kill-sbatch 2> /dev/null || exec {sbatch} "$@"
{sbatch} "$@" > /dev/null
kill -KILL $$
"""
"""Submits; if a test ordered so, it ends as a client that the kernel kills, or as one whose controller is busy."""


class FaultRun:
    """One run on the cluster that is trained repeatedly, and the faults it suffers."""

    steps = 120
    every = 4

    def __init__(self, checkout: ClusterCheckout) -> None:
        self.checkout = checkout
        self.cluster = checkout.cluster
        (checkout.root / "sitecustomize.py").write_text(HOOKS)
        (checkout.root / "orders").mkdir()
        (checkout.root / "bin").mkdir()
        (checkout.root / "bin/sbatch").write_text(SBATCH.format(root=checkout.root, sbatch=shutil.which("sbatch")))
        (checkout.root / "bin/sbatch").chmod(0o755)
        self.driver: subprocess.Popen[str] | None = None
        self.configured: dict[str, Any] = {}
        self.reads_in_job = False
        """The job reads a checkpoint before it resumes, as if it were too large for the driver."""
        self.expected: list[str] = []
        """Patterns in the output of the drivers or a message of an attempt."""

    def configure(self, strategy: str, ranks_per_node: int = 1, hang_seconds: int = 10, **changes: Any) -> None:
        """Plan and render the run with ``strategy`` on two nodes, unless it is configured so already."""
        run: dict[str, Any] = {
            "strategy": strategy, "max_steps": self.steps, "checkpoints": {"every_steps": self.every},
            "eval_every_steps": "never",
        } | changes  # fmt: skip
        few = {"processes_per_node": ranks_per_node, "hang_seconds": hang_seconds}
        wanted = run | few
        if wanted == self.configured:
            return
        self.configured = {}
        self.checkout.configure_cluster(**run)
        file = self.checkout.root / "config/cluster.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | few))
        for stage in ("fetch", "plan", "render", "data"):
            self.checkout.on_login_node("shardmake", stage, "demo", env=self.environment)
        self.configured = wanted

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that drivers start with and pass on to all their processes."""
        path = os.pathsep.join([str(self.checkout.root), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        programs = os.pathsep.join([f"{self.checkout.root}/bin", str(Path(sys.executable).parent), os.environ["PATH"]])
        return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PATH": programs}

    def repair(self) -> None:
        """Reset the cluster, also after a failed test, with free disk space on every node."""
        if self.driver and self.driver.poll() is None:
            self.driver.kill()
        self.cluster.reset()
        for node in NODES:
            self.cluster.run(["mount", "-o", "remount,size=50%", "/tmp"], node=node)

    # ---- the driver -------------------------------------------------------------------------------------------------

    def start(self, **variables: str) -> None:
        """Start a driver, with ``variables`` in its environment."""
        variables |= {"READ_IN_JOB": "1"} if self.reads_in_job else {}
        log = (self.checkout.root / "driver.log").open("a")
        command = self.checkout.command("shardmake", "train", "demo")
        environment = self.environment | variables
        self.driver = self.cluster.popen(command, cwd=self.checkout.root, env=environment, stdout=log)

    def start_snakemake(self) -> subprocess.Popen[str]:
        """Start a Snakemake that starts the driver."""
        log = (self.checkout.root / "driver.log").open("a")
        command = self.checkout.command("snakemake", "--profile", "slurm", "--nolock", "runs/demo/train/receipt.json")
        return self.cluster.popen(command, cwd=self.checkout.root, env=self.environment, stdout=log)

    def wait(self, timeout: float = 900) -> int:
        assert self.driver
        return self.driver.wait(timeout)

    def log(self) -> str:
        return (self.checkout.root / "driver.log").read_text()

    def order(self, what: str, details: str = "now") -> None:
        """Order one process to cause a fault in itself (see `HOOKS`)."""
        order = self.checkout.root / "orders" / what
        order.with_name(f".{what}").write_text(details)
        order.with_name(f".{what}").rename(order)

    def slow(self, seconds: float, rank: int = 1) -> None:
        """Let each step of a rank take ``seconds`` longer from now on."""
        self.order(f"slow-{rank}", str(seconds))

    def order_killer(self, rank: int, pattern: str, mode: str) -> None:
        """Order a rank to cause a fault in its next write of a save that matches; see `tests.kill_at_write`."""
        log = self.checkout.root / "writes.log"
        log.unlink(missing_ok=True)
        order = {"folder": str(self.checkpoints), "log": str(log), "at": pattern, "mode": mode}
        self.order(f"killer-{rank}", json.dumps(order))

    def writes(self) -> str:
        log = self.checkout.root / "writes.log"
        return log.read_text() if log.exists() else ""

    def expect(self, pattern: str) -> None:
        """Let the drivers print ``pattern`` until the training ends, or an attempt have it in its message."""
        self.expected.append(pattern)

    def remove_training(self) -> None:
        self.expected.clear()
        if (self.checkout.run / "train").exists():
            shutil.rmtree(self.checkout.run / "train")
        for order in (self.checkout.root / "orders").iterdir():
            order.unlink()
        (self.checkout.root / "driver.log").unlink(missing_ok=True)

    def history(self) -> list[dict[str, Any]]:
        path = self.checkout.run / "train/attempts/index.json"
        return json.loads(path.read_text()) if path.exists() else []

    def ends(self) -> list[str]:
        return [record["end"] for record in self.history()]

    def wait_for_ends(self, count: int, what: str, spare: Collection[str] = ()) -> None:
        """Wait until ``count`` attempts have ended, beside those in ``spare``; the error has the drivers' output."""

        def have_ended() -> bool:
            return len([end for end in self.ends() if end not in spare]) >= count

        try:
            self.cluster.wait_until(have_ended, f"the end of {what}", timeout=400)
        except ClusterError as error:
            raise ClusterError(f"{error}\n--- drivers\n{self.log()}\n{self.history()}") from None

    def job_ids(self) -> set[str]:
        return {job.id for job in self.checkout.training_jobs()}

    def job(self) -> str:
        (job,) = [job.id for job in self.checkout.training_jobs() if job.state == "RUNNING"]
        return job

    # ---- the training -----------------------------------------------------------------------------------------------

    def attempts(self) -> list[AttemptDir]:
        return [AttemptDir(path) for path in sorted((self.checkout.run / "train/attempts").glob("[0-9]*"))]

    def attempt(self) -> AttemptDir | None:
        return next(reversed(self.attempts()), None)

    def beat(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of a rank of the newest attempt, unless that attempt has ended."""
        attempt = self.attempt()
        return attempt.beat(rank) if attempt and not attempt.exits() else None

    def wait_for_steps(self, steps: int, attempts: int = 1) -> Heartbeat:
        """Wait until attempt number ``attempts`` has done ``steps`` more; return the heartbeat of rank 1."""
        started: list[int] = []

        def is_there() -> bool:
            beat = self.beat(1)
            attempt = self.attempt()
            if beat is None or attempt is None or int(attempt.root.name) < attempts or beat.phase != "train":
                return False
            started.append(beat.step)
            return beat.step - started[0] >= steps

        self.cluster.wait_until(is_there, f"{steps} steps of attempt {attempts}", timeout=600)
        beat = self.beat(1)
        assert beat
        return beat

    def ready_processes(self) -> dict[int, float]:
        """Return the launchers and ranks that wait, or have waited, with the processor seconds of each."""
        found = {}
        for process in psutil.process_iter(["cmdline", "cpu_times", "pid"]):
            words = process.info["cmdline"] or []
            if words and words[-1].isdigit() and any(str(self.checkout.root) in word for word in words):
                found[process.info["pid"]] = sum(process.info["cpu_times"][:2])
        return found

    def wait_for_ready_processes(self, used: Collection[int] = ()) -> set[int]:
        """Wait until a launcher and a rank for each node have imported their libraries, beside those in ``used``."""

        def waiting() -> dict[int, float]:
            return {pid: seconds for pid, seconds in self.ready_processes().items() if pid not in used}

        def have_imported() -> bool:
            before = waiting()
            time.sleep(2)
            return len(before) == 4 and before == waiting()

        self.cluster.wait_until(have_imported, "launchers and ranks that wait", timeout=200)
        return {*waiting()}

    def wait_for_checkpoint(self, attempts: int = 1) -> Heartbeat:
        """Wait until attempt number ``attempts`` has saved one and done some steps more; see `wait_for_steps`."""
        return self.wait_for_steps(self.every + CHANCE.randint(1, self.every - 2), attempts)

    @property
    def checkpoints(self) -> Path:
        return RunDir(self.checkout.run).checkpoints

    def starts(self) -> int:
        """Return how often the job of the newest attempt was started again."""
        attempt = self.attempt()
        return len(list(attempt.root.glob("start-*"))) if attempt else 0

    def parent(self, beat: Heartbeat, generations: int) -> str:
        """Return the process id, on its node, of a rank's launcher (1) or worker (2)."""
        pid = str(beat.pid)
        for _ in range(generations):
            pid = self.cluster.run(["ps", "-o", "ppid=", "-p", pid], node=beat.host).stdout.strip()
        return pid

    def send(self, signal_name: str, pid: object, node: str) -> None:
        self.cluster.run(["kill", f"-{signal_name}", str(pid)], node=node)

    # ---- the result -------------------------------------------------------------------------------------------------

    def result(self) -> dict[int, float]:
        """Return the losses by step of a finished training, in which no step occurs twice."""
        assert (self.checkout.run / "train/receipt.json").exists(), self.log()
        lines = [line["step"] for line in self.checkout.metrics() if "loss" in line]
        assert lines == sorted(set(lines)), "a step is logged twice"
        return self.checkout.losses()

    def weights(self) -> dict[str, Any]:
        return weights_of(self.checkout)


def weights_of(checkout: ClusterCheckout) -> dict[str, Any]:
    from safetensors.torch import load_file

    from shardmake.consolidate.merge import consolidate

    receipt = checkout.read("train/receipt.json")
    out = checkout.root / "merged"
    shutil.rmtree(out, ignore_errors=True)
    consolidate(checkout.run / receipt["checkpoint"], out, base=checkout.root / "resources/demo/base", workers=1)
    return load_file(out / "model.safetensors")


def make_fault_run(cluster: Cluster, root: Path, inputs: Path) -> FaultRun:
    """Create a run in ``root``, which all nodes of the cluster share, in place of an earlier one."""
    shutil.rmtree(root, ignore_errors=True)
    checkout = ClusterCheckout.create(root, inputs)
    assert isinstance(checkout, ClusterCheckout)
    checkout.cluster = cluster
    return FaultRun(checkout)
