"""Checks of a compute node that need neither torch nor a GPU: limits, folders, versions, network interface."""

import fcntl
import os
import resource
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from shardmake.checkpoint.record import VISIBLE_SECONDS
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core.environment import hub_cache, library_versions, scratch_folder
from shardmake.core.process import wait_until
from shardmake.core.temporary import temporary_folder
from shardmake.core.units import GIB, MIB, format_bytes
from shardmake.doctor.records import DoctorRequest
from shardmake.launch.compilers import check_compilers
from shardmake.launch.preflight import SCRATCH_ADVICE, check_names, check_scratch, check_versions
from shardmake.launch.rendezvous import RendezvousError, choose_address
from shardmake.run.findings import Check, Finding, not_checked, ok, ok_if, stops, warning

INFINIBAND = Path("/sys/class/infiniband")
SHARED_MEMORY = Path("/dev/shm")
SMALL_SHARED_MEMORY = GIB
FEW_FILES = 1024
SLOW_SECONDS = 5.0
_MEMLOCK_ADVICE = (
    "Ask the administrators to set LimitMEMLOCK=infinity for slurmd: `srun bash -c 'ulimit -l'` must print unlimited."
)
_EXEC_SECONDS = 10
_PAUSE = 0.05
"""Seconds between two looks for a file of another node."""


def host_checks(request: DoctorRequest, folder: Path) -> dict[str, Check]:
    """Return the checks by name; ``folder`` is on shared storage."""
    cluster, host = request.cluster, os.uname().nodename
    return {
        "environment": lambda: check_environment(request.environment, request.versions),
        "cores and memory": lambda: check_size(cluster.cpus_per_node),
        "locked memory": lambda: check_memlock(
            sorted(path.name for path in INFINIBAND.glob("*")), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        ),
        "shared memory": lambda: check_shared_memory(shutil.disk_usage(SHARED_MEMORY).total),
        "open files": lambda: check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        "scratch": lambda: check_scratch_folder(cluster.scratch),
        "NVMe": lambda: check_nvme(cluster.nvme_path),
        "hub cache": lambda: check_cache_readable(cluster.cache),
        "shared folder": lambda: check_writable(folder),
        "network interface": lambda: check_interface(cluster.network_interface, request.nodes),
        # Ranks connect by address, so a name that does not resolve is a warning.
        "name service": lambda: check_names(host) or [ok("name service", f"{host} resolves to an address and back")],
    }


def check_environment(login: str | None, versions: Mapping[str, str]) -> Iterator[Finding]:
    """Compare the Python environment, unless it is a container's, and the versions with the login node's."""
    advice = "Install Shardmake in a folder that all nodes see, and use that environment on the login node."
    place = "on this node"
    if login is None:
        advice, place = "Install the login node's versions in the image.", "in the container"
    elif sys.prefix != login:
        yield warning("environment", f"Python is in {sys.prefix}, and jobs should have {login}", advice)
    different = check_versions(library_versions(), versions, place, advice)
    yield from different
    if not different and login in (None, sys.prefix):
        inside = " in the container" if login is None else ""
        yield ok("environment", f"{sys.prefix}{inside}, the same versions as on the login node")


def check_size(cpus: int) -> Finding:
    """Compare the cores that the job may use with those it requested, and report the memory."""
    usable = len(os.sched_getaffinity(0))
    found = f"{usable} usable cores, {psutil.virtual_memory().total // GIB} GiB"
    requested = "" if usable >= cpus else f"; {cpus} cores were requested"
    advice = "Set cpus_per_node in the cluster file to this number, or ask your site how jobs get all their cores."
    return ok_if(not requested, "cores and memory", found + requested, advice)


def check_memlock(adapters: Sequence[str], limit: int) -> Finding:
    """Return a limit of locked memory on a node with InfiniBand, to which NCCL registers its buffers."""
    if not adapters:
        return ok("locked memory", "no InfiniBand adapter, so the limit does not matter")
    if limit == resource.RLIM_INFINITY:
        return ok("locked memory", f"unlimited; adapters {', '.join(adapters)}")
    return stops("locked memory", f"limited to {format_bytes(limit)} with {', '.join(adapters)}", _MEMLOCK_ADVICE)


def check_shared_memory(size: int) -> Finding:
    """Return a small /dev/shm, which NCCL and data loader workers use."""
    advice = "NCCL and data loader workers may fail. Ask your site for 1 GiB or more."
    return ok_if(size >= SMALL_SHARED_MEMORY, "shared memory", f"/dev/shm has {format_bytes(size)}", advice)


def check_open_files(limit: int) -> Finding:
    """Return a low limit of open files."""
    unlimited = limit == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{limit} for each process"
    advice = f"Add `ulimit -n {FEW_FILES}` to slurm.setup in the cluster file."
    return ok_if(unlimited or limit >= FEW_FILES, "open files", found, advice)


def check_scratch_folder(given: str) -> Finding:
    """Return whether the scratch folder is writable, has space, and may hold programs and libraries."""
    if problems := check_scratch(given):
        return problems[0]
    scratch = scratch_folder(given)
    found = f"{scratch}, {format_bytes(shutil.disk_usage(scratch).free)} free"
    with temporary_folder("doctor", scratch) as place:
        program = place / "program"
        program.write_text("#!/bin/sh\nexit 0\n")
        program.chmod(stat.S_IRWXU)
        try:
            runs = subprocess.run([program], timeout=_EXEC_SECONDS).returncode == 0
        except OSError:
            runs = False
    advice = f"{SCRATCH_ADVICE} Compiled kernels are loaded from there, so it must not be mounted noexec."
    return ok_if(runs, "scratch", found + ("" if runs else ", but programs cannot run there"), advice, stops)


def check_build_tools(request: DoctorRequest, variables: Mapping[str, str]) -> Iterator[Finding]:
    """Report what is missing to compile DeepSpeed's extensions for offload, with NVMe if it is configured."""
    nvme = request.cluster.nvme_path is not None
    offloading = [spec for spec in STRATEGY_SPECS.values() if spec.is_deepspeed and spec.offload_optimizer]
    spec = next(spec for spec in offloading if spec.uses_nvme == nvme)
    fine = "a small program for offload compiles" + (", also with libaio" if nvme else "")
    yield from check_compilers(spec, variables, on_gpus=not request.cluster.is_cpu) or [ok("compilers", fine)]


def check_nvme(path: str | None) -> Iterator[Finding]:
    """Report whether ``nvme_path`` is writable; without it, report local NVMe that could be used."""
    if path is None:
        places = ", ".join(f"{point} ({free:.0f} GiB free)" for point, free in writable_nvme().items())
        if places:
            yield not_checked("NVMe", f"nvme_path is not set; writable here: {places}", "Set nvme_path for zero3-nvme.")
    elif os.access(path, os.W_OK | os.X_OK):
        yield ok("NVMe", f"{path}, {format_bytes(shutil.disk_usage(path).free)} free")
    else:
        advice = "Correct nvme_path in the cluster file, or create the folder in slurm.setup."
        yield stops("NVMe", f"nvme_path {path} cannot be written", advice)


def writable_nvme(mounts: Path = Path("/proc/mounts")) -> dict[str, float]:
    """Return the free GiB of each mounted local NVMe file system in which the user can write."""
    rows = [line.split()[:2] for line in mounts.read_text().splitlines()]
    points = [point for device, point in rows if device.startswith(("/dev/nvme", "/dev/md")) and Path(point).is_dir()]
    found = [point for point in points if os.access(point, os.W_OK | os.X_OK)]
    return {point: round(shutil.disk_usage(point).free / GIB, 1) for point in found}


def check_cache_readable(cache: str | None) -> Finding:
    """Return whether the node can read the hub's cache."""
    place = hub_cache(cache)
    if os.access(place, os.R_OK | os.X_OK):
        return ok("hub cache", f"{place} can be read")
    if place.exists():
        return stops("hub cache", f"{place} cannot be read here", "Set `cache` in the cluster file to a shared folder.")
    reason = f"{place} does not exist here; it may not exist anywhere before the first `fetch`"
    return not_checked("hub cache", reason, "Run this again after the first `fetch`.")


def check_writable(folder: Path) -> Finding:
    """Return whether the node can write the shared folder."""
    can = os.access(folder, os.W_OK | os.X_OK)
    found = f"{folder} {'can be written' if can else 'cannot be written here'}"
    return ok_if(can, "shared folder", found, "Work in a folder that all nodes mount.", stops)


def check_interface(configured: str | None, nodes: int) -> Finding:
    """Return the interface for training, and a faster one that is not used."""
    try:
        name, address = choose_address(configured, nodes=max(nodes, 2))  # one node alone would get loopback
    except RendezvousError as error:
        return stops("network interface", str(error), "Set network_interface in the cluster file.")
    up = [other for other, status in psutil.net_if_stats().items() if status.isup]
    faster = [other for other in up if other.startswith(("ib", "hsn")) and other != name]
    if configured is not None or not faster or name.startswith(("ib", "hsn")):
        return ok("network interface", f"{name} ({address})")
    advice = f"Set network_interface: {faster[0]} in the cluster file, on all nodes the same."
    found = f"{name} ({address}) has the default route; {', '.join(faster)} is up"
    return warning("network interface", found, advice)


def check_visibility(folder: Path, node_rank: int, nodes: int, seconds: float = VISIBLE_SECONDS) -> Finding:
    """Write a file and wait for those of the other nodes; all nodes call it at the same time.

    The nodes look for the files before they exist, because a network file system may remember that for a while.
    """
    if nodes == 1:
        return not_checked("files of other nodes", "the job has one node", "Run it again with `--nodes 2`.")
    folder.mkdir(exist_ok=True)
    others = [folder / f"seen-by-all-{other}" for other in range(nodes) if other != node_rank]
    started = time.monotonic()
    missing = [path for path in others if not path.exists()]
    (folder / f"seen-by-all-{node_rank}").write_bytes(b"x" * MIB)
    came = wait_until(lambda: all(one.exists() and one.stat().st_size == MIB for one in missing), seconds, _PAUSE)
    took = time.monotonic() - started
    if not came:
        found = f"a file of another node was not visible here after {seconds:.0f} s"
        return stops("files of other nodes", found, "Work in a folder that all nodes mount, under one path.")
    if took > SLOW_SECONDS:
        advice = "Keep `latency-wait: 60` in the profile. Nodes wait longer for each other at the start."
        return warning("files of other nodes", f"visible here after {took:.0f} s", advice)
    return ok("files of other nodes", f"visible here within {max(1, round(took))} s")


def check_shared_lock(folder: Path, node_rank: int, nodes: int, seconds: float = VISIBLE_SECONDS) -> Finding:
    """Lock a file on node 0 and try to lock it on node 1, which must be refused; all nodes call it at the same time."""
    if nodes == 1 or node_rank > 1:
        return not_checked("file locks of nodes", "a lock is tried from node 1 against node 0", "Use `--nodes 2`.")
    locked, tried = folder / "locked", folder / "tried"
    with (folder / "lock").open("w") as file:
        if node_rank == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
            locked.touch()
            if wait_until(tried.exists, seconds, _PAUSE):
                return ok("file locks of nodes", "locked here, and tried on node 1")
            return not_checked("file locks of nodes", "node 1 did not try to lock the file")
        if not wait_until(locked.exists, seconds, _PAUSE):
            return not_checked("file locks of nodes", "node 0 did not lock the file")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ok("file locks of nodes", "a lock of node 0 counts here")
        finally:
            tried.touch()
    advice = "Start the same run from one login node only: locks do not prevent a second driver on another one."
    return warning("file locks of nodes", "a lock of node 0 does not count here", advice)
