"""A real Slurm cluster on this machine: start it, stop it, and cause faults in it.

``Cluster`` starts munge, slurmctld and three slurmd. Every node has its own network, host name, process table, /tmp and
/dev/shm, and shares the rest of the machine's file system: a checkout and its virtual environment are where they always
are. Nothing outside the cluster's folder and its namespaces is touched; a Slurm of the machine's own does not notice.
"""

import fcntl
import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster import accounting as accounts
from tests.cluster import namespaces
from tests.cluster.slurm_conf import (
    ADDRESSES,
    GPUS_PER_NODE,
    HEAD,
    NODES,
    cgroup_conf,
    gres_conf,
    hosts,
    job_submit,
    slurm_conf,
    slurmdbd_conf,
)

REUSE = os.environ.get("SHARDMAKE_CLUSTER") == "reuse"
_WORKER = "" if REUSE else os.environ.get("PYTEST_XDIST_WORKER", "")
STATE = Path("/var/lib", "-".join(filter(None, ("shardmake-cluster", _WORKER))))
"""The folder of the cluster; each process of xdist has a cluster of its own."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scancel", "scontrol")


class ClusterError(RuntimeError):
    """A request to the cluster failed; the message has the output of its programs."""


class Job(NamedTuple):
    """A job as `squeue` lists it."""

    id: str
    name: str
    state: str
    nodes: str
    partition: str
    reason: str


def available(*, accounting: bool = False) -> str | None:
    """Return what this machine lacks to run a cluster, or None."""
    return namespaces.missing([*PROGRAMS, *(accounts.PROGRAMS if accounting else ())])


class Cluster:
    """Three nodes `c1`, `c2`, `c3` and the login node `head`, which also runs the controller.

    As a context manager the cluster is down afterwards. With ``accounting``, slurmdbd and a private MariaDB run too,
    and `sacct` knows every job. Clusters with different ``state`` folders do not see each other.
    """

    def __init__(self, state: Path = STATE, *, accounting: bool = False) -> None:
        self.state = state
        self.accounting = accounting
        self.shared = state / "shared"
        """Return a folder that has the same name on all nodes and in this process (unlike /tmp)."""
        self._lock: int | None = None
        self._outlives_us = False
        self._inits: dict[str, int] = {}
        self._children: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Cluster":
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # -- life ---------------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Start the cluster, after removing what a crashed harness left of an earlier one.

        Raises `ClusterError` if one is in use, was left running with `leave_up`, or does not start.
        """
        if reason := available(accounting=self.accounting):
            raise ClusterError(f"A cluster needs {reason}.")
        self._acquire()
        if self._left_up():
            self._release()
            raise ClusterError(f"A cluster is up in {self.state}. Use it (SHARDMAKE_CLUSTER=reuse) or take it down.")
        self._remove()
        try:
            self._start()
        except BaseException as error:
            logs = self.logs()
            self.down()
            raise ClusterError(f"The cluster did not start: {error}\n{logs}") from error

    def down(self) -> None:
        """Kill every process of the cluster and delete its folder; the kernel removes the rest with them."""
        if namespaces.is_on_cluster(os.getpid(), self.state):
            raise ClusterError("This process runs on the cluster. Leave the cluster's shell first.")
        if self._lock is None:
            self._acquire()
        self._remove()
        self.state.rmdir()
        self._release()

    def leave_up(self) -> None:
        """Let the cluster outlive this process."""
        self._outlives_us = True
        self._record()
        self._release()

    def attach(self) -> None:
        """Take over a cluster that `leave_up` left, fresh: no jobs, all nodes idle. End with `leave_up`."""
        self._acquire()
        if not self._left_up() or self._read_record()["accounting"] != self.accounting:
            self._release()
            raise ClusterError(f"No cluster (with accounting={self.accounting}) was left up in {self.state}.")
        self._outlives_us = True
        self.reset()

    def is_up(self) -> bool:
        self._inits = self._read_record().get("inits", {})
        return self._is_alive(HEAD) and self._controller_answers()

    def _left_up(self) -> bool:
        return bool(self._read_record().get("left_up")) and self.is_up()

    def _start(self) -> None:
        self._write_files()
        head = namespaces.start_head(self.state, ADDRESSES[HEAD])
        self._adopt(HEAD, head, head.pid)
        munge = self.state / "munge"
        files = {"socket": "socket", "key-file": "key", "seed-file": "seed", "pid-file": "pid", "log-file": "log"}
        self.run(["munged", *(f"--{option}={munge / name}" for option, name in files.items())])
        if self.accounting:
            accounts.start(self.state, self.run)
        self.run(["slurmctld"])
        for node in NODES:
            self.start_node(node)
        self.wait_idle()

    def _write_files(self) -> None:
        for folder in ("etc/slurm", "log", "munge", "slurmctld", "shared"):
            (self.state / folder).mkdir(parents=True)
        key = self.state / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        for gpu in range(GPUS_PER_NODE):
            os.mknod(self.state / f"gpu{gpu}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        etc = self.state / "etc"
        (etc / "hosts").write_text(hosts())
        (etc / "slurm/slurm.conf").write_text(slurm_conf(self.state, accounting=self.accounting))
        (etc / "slurm/gres.conf").write_text(gres_conf(self.state))
        (etc / "slurm/job_submit.lua").write_text(job_submit())
        (etc / "slurm/cgroup.conf").write_text(cgroup_conf())
        if self.accounting:
            (etc / "slurm/slurmdbd.conf").touch(0o600)
            (etc / "slurm/slurmdbd.conf").write_text(slurmdbd_conf(self.state))

    def _remove(self) -> None:
        namespaces.kill_all(self.state)
        for child in self._children:
            child.communicate()
        self._children.clear()
        self._inits.clear()
        for entry in self.state.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    # -- lock and record ----------------------------------------------------------------------------------------------

    def _acquire(self) -> None:
        self._lock = _lock_folder(self.state)
        if self._lock is None:
            raise ClusterError(f"Another process uses the cluster in {self.state}.")

    def _release(self) -> None:
        assert self._lock is not None
        os.close(self._lock)
        self._lock = None

    def _record(self) -> None:
        record = {"left_up": self._outlives_us, "accounting": self.accounting, "inits": self._inits}
        (self.state / "record.json").write_text(json.dumps(record))

    def _read_record(self) -> dict[str, Any]:
        path = self.state / "record.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _adopt(self, host: str, child: subprocess.Popen[str], init: int) -> None:
        self._children.append(child)
        self._inits[host] = init
        self._record()

    def _is_alive(self, host: str) -> bool:
        return host in self._inits and namespaces.is_on_cluster(self._inits[host], self.state)

    # -- commands -----------------------------------------------------------------------------------------------------

    def command(self, command: str | Sequence[str], *, node: str = HEAD, cwd: Path | str | None = None) -> list[str]:
        """Return the words that run ``command`` (a string with bash) on a host, in ``cwd`` or the current folder."""
        words = ["bash", "-c", command] if isinstance(command, str) else list(command)
        if not self._is_alive(node):
            raise ClusterError(f"{node} of the cluster in {self.state} is not running.")
        inside = namespaces.enter(self._inits[node], process_table=node != HEAD)
        return [*inside, "env", f"--chdir={cwd or Path.cwd()}", *words]

    def run(
        self,
        command: str | Sequence[str],
        *,
        node: str = HEAD,
        check: bool = True,
        timeout: float = 300,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``command`` on the login node (or ``node``) and return its output.

        Raises `ClusterError` with that output if ``check`` and it fails. ``env`` adds to `environment`.
        """
        result = subprocess.run(
            self.command(command, node=node, cwd=cwd), env=environment(env), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        if check and result.returncode:
            words = command if isinstance(command, str) else shlex.join(command)
            raise ClusterError(f"{words} ended with {result.returncode}:\n{result.stdout}{result.stderr}")
        return result

    def popen(
        self,
        command: str | Sequence[str],
        *,
        node: str = HEAD,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        stdout: Any = None,
    ) -> subprocess.Popen[str]:
        """Start ``command`` as `run` does, in a session of its own, and do not wait.

        On the login node the process returned is the command itself, so signals reach it. On a node it stands outside
        of the node's process table; use ``os.killpg`` there.
        """
        words = self.command(command, node=node, cwd=cwd)
        stderr = None if stdout is None else subprocess.STDOUT
        return subprocess.Popen(
            words, env=environment(env), stdout=stdout, stderr=stderr, text=True, start_new_session=True
        )

    # -- Slurm --------------------------------------------------------------------------------------------------------

    def jobs(self) -> list[Job]:
        """Return all active jobs and those that ended in the last 300 s (MinJobAge), oldest first."""
        columns = "%i|%j|%T|%N|%P|%r"
        output = self.run(["squeue", "--states=all", "--noheader", "--sort=i", f"--format={columns}"]).stdout
        return [Job(*line.split("|")) for line in output.splitlines()]

    def job(self, job_id: str) -> Job:
        return next(job for job in self.jobs() if job.id == job_id)

    def node_states(self) -> dict[str, str]:
        """Return the state of every node as `sinfo` prints it: idle, mixed, allocated, down, idle* (does not respond)..."""
        output = self.run(["sinfo", "--noheader", "--Node", "--partition=gpu", "--format=%N %T"]).stdout
        return dict(line.split() for line in output.splitlines())

    def wait_until(self, condition: Callable[[], bool], what: str, *, timeout: float = 60) -> None:
        """Wait for ``condition``; raise `ClusterError` with ``what``, the queue and the logs after ``timeout`` s."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise ClusterError(f"Waited {timeout} s for {what}\n{self.jobs()}\n{self.node_states()}\n{self.logs()}")
            time.sleep(0.1)

    def wait_job(self, job_id: str, *states: str, timeout: float = 60) -> None:
        self.wait_until(lambda: self.job(job_id).state in states, f"job {job_id} to be {states}", timeout=timeout)

    def wait_idle(self, *, timeout: float = 120) -> None:
        """Wait until no job is queued or running and all nodes are idle."""
        self.wait_until(self._is_idle, "an idle cluster", timeout=timeout)

    def _is_idle(self) -> bool:
        queue = self.run(["squeue", "--noheader"], check=False)
        return queue.returncode == 0 and not queue.stdout and self.node_states() == dict.fromkeys(NODES, "idle")

    def reset(self) -> None:
        """Bring the cluster back to how `up` left it: nodes running and connected, no jobs."""
        if not self._controller_answers():
            self.restart_controller()
        self.repair_nodes()
        for options in ("--signal=KILL --full", ""):  # fails for a job that ends meanwhile; `wait_idle` is the check
            self.run(f"squeue --noheader --format=%A | xargs --no-run-if-empty scancel {options}", check=False)
        self.wait_idle()

    def repair_nodes(self) -> None:
        """Start every node that is off, and connect the others."""
        for node in NODES:
            self.join(node) if self._is_alive(node) else self.start_node(node)

    # -- failures -----------------------------------------------------------------------------------------------------

    def cut(self, node: str) -> None:
        """Disconnect the network of ``node``; its processes continue."""
        self.run(["ip", "link", "set", node, "down"])

    def join(self, node: str) -> None:
        self.run(["ip", "link", "set", node, "up"])

    def kill_node(self, node: str) -> None:
        """Power ``node`` off: its slurmd, job steps, network and /tmp disappear at once."""
        namespaces.kill(self._inits[node])
        namespaces.wait_gone(self._inits[node])
        self.run(["ip", "link", "delete", node], check=False)

    def declare_down(self, node: str) -> None:
        """Report to Slurm that ``node`` is down, as a cluster's monitoring does; Slurm itself needs longer.

        Its jobs end as NODE_FAIL, or are queued again if they may be.
        """
        self.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=gone"])

    def start_node(self, node: str) -> None:
        """Power ``node`` on. Slurm uses it again once its slurmd has registered."""
        process, init = namespaces.start_node(self.state, self._inits[HEAD], node, ADDRESSES[node])
        self._adopt(node, process, init)

    def stop_controller(self) -> None:
        """End slurmctld; jobs keep running, commands fail."""
        pid_file = self.state / "slurmctld.pid"
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
        namespaces.wait_gone(pid)

    def restart_controller(self) -> None:
        """Restart slurmctld, which restores its jobs from its saved state."""
        self.stop_controller()
        self.run(["slurmctld"])
        self.wait_until(self._controller_answers, "the controller")

    def _controller_answers(self) -> bool:
        return self.run(["scontrol", "ping"], check=False).returncode == 0

    def logs(self, *, lines: int = 20) -> str:
        """Return the last lines of every daemon's log."""
        files = sorted((self.state / "log").glob("*.log"))
        return "\n".join(f"--- {file.name}\n" + "\n".join(file.read_text().splitlines()[-lines:]) for file in files)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without its Slurm, with this Python's programs first on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    path = f"{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, **(extra or {})}


def _lock_folder(folder: Path) -> int | None:
    """Make and lock ``folder``; None if another process holds it. The kernel drops the lock with its owner."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        if folder.exists() and os.path.samestat(os.fstat(lock), folder.stat()):
            return lock
        os.close(lock)  # its last owner deleted it between our open and our lock
