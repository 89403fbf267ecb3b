"""Hosts made of Linux namespaces, and their processes.

A host has its own mounts, network and name; a compute node has its own process table as well, so that it dies as one.
Everything a host owns lies in its namespaces, and the kernel removes those with the last process. Whose a process is
can be read from the process itself: a host mounts a tmpfs over `/etc/slurm` whose source is the cluster's folder, and
all descendants keep that mount. So nothing has to be recorded to find what a crashed harness left.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

LABEL_MOUNT = "/etc/slurm"

HEAD_SCRIPT = """
state=$0; address=$1
mount -t tmpfs -o mode=755 "$state" /etc/slurm
cp "$state"/etc/slurm/* /etc/slurm/
mount --bind "$state/etc/hosts" /etc/hosts
hostname head
ip link set lo up
ip link add br0 type bridge
ip address add "$address/24" dev br0
ip link set br0 up
echo ready
exec sleep infinity
"""

# Waits for its end of the cable (eth0) before it starts slurmd (-b: the node has just booted, so jobs it had are lost).
# As process 1 it also reaps what jobs leave behind.
NODE_SCRIPT = """
name=$0; address=$1
mount -t proc proc /proc
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
hostname "$name"
ip link set lo up
echo ready
read -r go
ip address add "$address/24" dev eth0
ip link set eth0 up
slurmd -D -b -N "$name" &
wait
"""


def spawn(command: Sequence[str], log: Path) -> subprocess.Popen[str]:
    """Start ``command`` in a session of its own and wait until it prints its first line."""
    with log.open("a") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd="/",
            start_new_session=True,
        )  # fmt: skip
    if not _pipe(process.stdout).readline():
        raise RuntimeError(f"{command[0]} ended with {process.wait()}: {log.read_text()}")
    return process


def notify(process: subprocess.Popen[str]) -> None:
    _pipe(process.stdin).write("go\n")
    _pipe(process.stdin).flush()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def start_head(state: Path, address: str) -> subprocess.Popen[str]:
    """Create the namespaces of the login node; the returned process keeps them."""
    command = ["unshare", "--mount", "--net", "--uts", "sh", "-ec", HEAD_SCRIPT, str(state), address]
    return spawn(command, state / "log" / "head.log")


def start_node(state: Path, head: int, name: str, address: str) -> tuple[subprocess.Popen[str], int]:
    """Create a compute node on the login node's bridge; the second value is the id of its process 1."""
    unshare = ["unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--kill-child"]
    command = [*enter(head), *unshare, "sh", "-ec", NODE_SCRIPT, name, address]
    process = spawn(command, state / "log" / f"{name}.log")
    (init,) = (child.pid for child in psutil.Process(process.pid).children())
    cable = f"ip link add {name} type veth peer name eth0 netns {init} && ip link set {name} master br0 up"
    subprocess.run([*enter(head), "sh", "-ec", cable], check=True)
    notify(process)
    return process, init


def enter(pid: int, *, process_table: bool = False) -> list[str]:
    """Return the words that, before a command, run it on the host of process ``pid``."""
    flags = ["--mount", "--net", "--uts", *(["--ipc", "--pid"] if process_table else [])]
    return ["nsenter", "--target", str(pid), *flags, "--"]


def processes(state: Path) -> Iterator[int]:
    """Return the ids of all processes of the cluster in ``state``."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_on_cluster(int(entry.name), state):
            yield int(entry.name)


def is_on_cluster(pid: int, state: Path) -> bool:
    """Return whether process ``pid`` has the label of the cluster in ``state``."""
    try:
        mounts = Path(f"/proc/{pid}/mountinfo").read_text()
    except OSError:  # gone, or a zombie
        return False
    return any(_label(line) == str(state) for line in mounts.splitlines())


def _label(line: str) -> str | None:
    """Return the source of a mount over `/etc/slurm`: ``id parent dev root MOUNT options... - type SOURCE super-options``."""
    left, _, right = line.partition(" - ")
    return right.split()[1] if left.split()[4] == LABEL_MOUNT else None


def kill_all(state: Path, *, timeout: float = 20) -> None:
    """Kill every process of the cluster in ``state`` and wait until none is left."""
    deadline = time.monotonic() + timeout
    while alive := list(processes(state)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {alive} of the cluster in {state} do not die")
        for pid in alive:
            kill(pid)
        time.sleep(0.05)


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_gone(pid: int, *, timeout: float = 20) -> None:
    """Wait for the end of a process, child or not."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout)


def missing(binaries: Sequence[str]) -> str | None:
    """Return what this machine lacks to create hosts that run ``binaries``."""
    if os.geteuid() != 0:
        return "root"
    absent = [name for name in ("unshare", "nsenter", "ip", *binaries) if shutil.which(name) is None]
    if absent:
        return f"the programs {', '.join(absent)}"
    if subprocess.run(["unshare", "--mount", "--net", "--uts", "true"], capture_output=True).returncode:
        return "the right to make namespaces (in a container: --privileged)"
    hidden = [str(path) for path in (Path.cwd(), Path(sys.prefix)) if path.is_relative_to("/tmp")]
    return f"{' and '.join(hidden)} outside /tmp, of which every node has its own" if hidden else None
