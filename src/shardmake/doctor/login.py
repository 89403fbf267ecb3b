"""Checks of a login node: Slurm and what the user may request, shared storage, installed versions."""

import fcntl
import getpass
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardmake.config.models import Cluster, Slurm
from shardmake.config.slurm_options import inherited
from shardmake.core.disk import UNLIMITED, free_space, mount_of
from shardmake.core.environment import hub_cache, installed_versions
from shardmake.core.errors import ConfigError, ShardmakeError, nearest
from shardmake.core.hub import ask_endpoint
from shardmake.core.private_names import SUPPORTED, check_libraries, library_warnings
from shardmake.core.temporary import temporary_folder
from shardmake.core.units import GIB, format_bytes, format_duration, plural
from shardmake.launch.container import check_job_environment
from shardmake.launch.gpu_status import installed_cuda, list_gpus
from shardmake.launch.gpus import check_build
from shardmake.launch.slurm_jobs import run_slurm
from shardmake.plan.limits import NodeGroup, Partition, query_partitions
from shardmake.run.findings import Check, Finding, not_checked, ok, ok_if, stops, warning

FEW_BYTES = 100 * GIB
"""Free space below which the first checkpoint of a model of some billion parameters does not fit."""
FEW_FILES = 100_000
"""About as many as one environment has."""
_LOCAL_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "ramfs")
_LOGIN_NODE = "Run it on a login node of the cluster, or name a cluster file with `executor: local`."


def login_checks(cluster: Cluster | None, asked: Slurm, folder: Path) -> dict[str, Check]:
    """Return the checks by name; ``asked`` is what jobs request, and runs are written below ``folder``."""
    slurm: dict[str, Check] = {
        "Slurm": check_slurm,
        "accounts": lambda: check_accounts(asked),
        "partitions": lambda: check_partitions(asked),
        "sacct": check_sacct,
    }
    here: dict[str, Check] = {
        "shared folder": lambda: check_shared_folder(folder, on_slurm=cluster is None or cluster.executor == "slurm"),
        "hub": check_hub,
        "hub cache": lambda: check_cache(cluster),
        "versions": check_versions,
        "torch": lambda: check_torch(cluster),
    }
    if cluster is not None and cluster.environment:
        here["environment of the jobs"] = lambda: check_job_environment(cluster)
    return here if cluster is not None and cluster.executor == "local" else slurm | here


def check_slurm() -> Finding:
    """Return whether Slurm answers here, and its version."""
    if shutil.which("scontrol") is None:
        return stops("Slurm", "scontrol is not installed here", _LOGIN_NODE)
    answer = run_slurm("scontrol", "ping")
    version = run_slurm("sinfo", "--version").stdout.strip()
    if answer.returncode:
        return stops("Slurm", f"{version or 'Slurm'} does not answer: {_first_line(answer.stderr)}", _LOGIN_NODE)
    return ok("Slurm", f"{version or 'the controller'} answers")


_BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def check_hub() -> Finding:
    """Return whether the hub answers with the proxy and the authorities of the environment; nothing is fetched."""
    for name in _BUNDLES:
        if (file := os.environ.get(name)) and not Path(file).is_file():
            return stops("hub", f"{name} is {file}, which is not a file", "Set it to your site's file of authorities.")
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("0", "", "false"):
        return ok("hub", "HF_HUB_OFFLINE is set: nothing is fetched here")
    proxies = [name for name in _PROXIES if os.environ.get(name)]
    through = f" through {proxies[0]}" if proxies else ""
    try:
        return ok("hub", f"{ask_endpoint()} answers{through}")
    except ShardmakeError as error:
        found, _, advice = str(error).partition("\n")
        return warning("hub", f"{found.rstrip('.')}{through}", advice)


def check_accounts(asked: Slurm) -> Iterator[Finding]:
    """Report the accounts and qos that the user may request, and compare them with those of the jobs."""
    settings = _scontrol_config()
    if settings.get("AccountingStorageType", "").endswith(("none", "(null)")):
        yield ok("accounts", "this Slurm has no accounting: it needs neither an account nor a qos")
        return
    question = ("show", "assoc", f"user={getpass.getuser()}", "format=account,qos")
    answer = run_slurm("sacctmgr", "--noheader", "--parsable2", *question)
    if answer.returncode:
        reason = f"sacctmgr does not answer: {_first_line(answer.stderr)}"
        yield not_checked("accounts", reason, "Ask your site which account and qos to set in the cluster file.")
        return
    enforced = settings.get("AccountingStorageEnforce", "").lower()
    rows = [line.split("|") for line in answer.stdout.splitlines() if line.count("|") == 1]  # ACCOUNT|QOS,QOS
    if not rows:
        found, ask = "sacctmgr lists no account of yours", "Ask your site for an account."
        strict = "associations" in enforced or "limits" in enforced or "qos" in enforced
        yield stops("accounts", found, ask) if strict else not_checked("accounts", found, ask)
        return
    accounts = sorted({account for account, _ in rows})
    qos = sorted({name for _, names in rows for name in names.split(",") if name})
    account = asked.account or inherited("account")
    if account and account not in accounts:
        advice = f"Set slurm.account (--account) to one of these.{nearest(account, accounts)}"
        yield stops("accounts", f"slurm.account {account!r} is not one of yours: {', '.join(accounts)}", advice)
    elif len(accounts) > 1 and not account:
        advice = "Set slurm.account, or Slurm charges your default account."
        yield warning("accounts", f"you may use {', '.join(accounts)}", advice)
    else:
        yield ok("accounts", f"you may use {', '.join(accounts)}")
    names = ", ".join(qos) or "none"
    if asked.qos and asked.qos not in qos:
        advice = f"Set slurm.qos (--qos) to one of these.{nearest(asked.qos, qos)}"
        yield stops("qos", f"slurm.qos {asked.qos!r} is not one of yours: {names}", advice)
    else:
        yield ok("qos", f"you may use {names}")


def check_partitions(asked: Slurm) -> Iterator[Finding]:
    """Report each partition with its nodes, and the partition of the jobs if there is no such partition."""
    try:
        partitions = query_partitions()
        unknown = {*(asked.partition or "").split(",")} - {"", *partitions}
        unknown -= {*query_partitions(hidden=True)} if unknown else set()
    except ShardmakeError as error:
        yield stops("partitions", _first_line(str(error)), _LOGIN_NODE)
        return
    for wanted in sorted(unknown):
        names = ", ".join(partitions) or "none"
        found = f"slurm.partition {wanted!r} does not exist; this cluster has {names}"
        yield stops("partitions", found, f"Correct slurm.partition (--partition).{nearest(wanted, partitions)}")
    rows = run_slurm("sinfo", "--noheader", "--format=%R|%a|%F").stdout.splitlines()
    states = {name: (state, nodes) for name, state, nodes in (row.split("|") for row in rows if row.count("|") == 2)}
    for partition in partitions.values():
        yield describe_partition(partition, *states.get(partition.name, ("up", "")))


def describe_partition(partition: Partition, state: str, nodes: str) -> Finding:
    """Return the finding about one partition; ``nodes``: numbers allocated/idle/other/total, if sinfo reported them."""
    name = f"partition {partition.name}{' (default)' if partition.is_default else ''}"
    minutes = partition.time_limit_minutes
    limit = "no time limit" if minutes is None else f"at most {format_duration(minutes * 60)}"
    found = f"{'; '.join(_describe_group(group) for group in partition.groups)}; {limit}"
    found += f"; allocated/idle/other/total {nodes}" if nodes else ""
    found += f"; its state is {state}" if state != "up" else ""
    return ok_if(state == "up", name, found, "Jobs wait until it is up. Use another partition.")


def _describe_group(group: NodeGroup) -> str:
    gpus = " and ".join(f"{count} {name or 'gpu'}" for name, count in group.gpus.items()) or "no GPUs"
    spelling = ", ".join(f"gpu_type: {name}" for name in group.gpus if name) or "no gpu_type"
    features = f", features {','.join(sorted(group.features))}" if group.features else ""
    size = f"{group.cpus} cores, {group.memory_mib // 1024} GiB"
    return f"{plural(group.nodes, 'node')} with {gpus} ({spelling}), {size}{features}"


def check_sacct() -> Finding:
    """Return whether Slurm keeps the state of jobs that have ended."""
    answer = run_slurm("sacct", "-X", "-n", "-P", "--starttime=now-1hour", "--format=JobIDRaw")
    if answer.returncode == 0:
        return ok("sacct", "it answers, so the state of ended jobs is known")
    seconds = _scontrol_config().get("MinJobAge", "some time")
    return warning(
        "sacct",
        f"it does not answer: {_first_line(answer.stderr)}",
        "Keep `slurm-status-command: squeue` in the profile. Training works without it. What is lost: the state of a "
        f"job that ended while no driver ran for longer than MinJobAge ({seconds}), and who cancelled a job.",
    )


def _scontrol_config() -> dict[str, str]:
    lines = run_slurm("scontrol", "show", "config").stdout.splitlines()
    return {name.strip(): value.strip() for name, equals, value in (line.partition("=") for line in lines) if equals}


def check_shared_folder(folder: Path, *, on_slurm: bool) -> Iterator[Finding]:
    """Report whether ``folder`` is writable and lockable, its file system, and the bytes and files that are left."""
    if not os.access(folder, os.W_OK | os.X_OK):
        yield stops("shared folder", f"{folder} cannot be written", "Run it in a folder of your own on shared storage.")
        return
    _, point, kind = mount_of(folder.resolve(), Path("/proc/mounts").read_text())
    found = f"{folder} is on {point} ({kind})"
    if on_slurm and kind in _LOCAL_FILE_SYSTEMS:
        advice = "Compute nodes must see it under the same path. `shardmake doctor --node` checks that."
        yield warning("shared folder", f"{found}, which looks like a local disk", advice)
    else:
        yield ok("shared folder", found)
    yield check_lock(folder)
    space = free_space(folder)
    advice = "A checkpoint takes 12 to 16 bytes for each trained parameter. The plan compares it with this space."
    yield ok_if(space.free >= FEW_BYTES, "free space", f"{format_bytes(space.free)} ({space.limit})", advice)
    found = "no limit" if space.files == UNLIMITED else f"{space.files:,} ({space.files_limit})"
    advice = "Put environment and caches elsewhere, or use an image (`slurm.container`)."
    yield ok_if(space.files >= FEW_FILES, "free files", found, advice)


def check_lock(folder: Path) -> Finding:
    """Return whether flock works in ``folder``: a second lock of one file must be refused."""
    with (
        temporary_folder("doctor", folder) as place,
        (place / "lock").open("w") as first,
        (place / "lock").open() as other,
    ):
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            advice = "Ask your site for a folder with file locks, such as Lustre mounted with `-o flock`."
            return stops("file locks", f"flock fails in {folder}: {error.strerror}", advice)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ok("file locks", "flock works")
    advice = "Never start the same run twice at once: nothing prevents a second driver here."
    return warning("file locks", f"two locks of one file were granted in {folder}", advice)


def check_cache(cluster: Cluster | None) -> Finding:
    """Return whether the hub's cache can be written."""
    place = hub_cache(cluster.cache if cluster else None)
    existing = next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return stops("hub cache", f"{place} cannot be written", "Set `cache` in the cluster file to a shared folder.")
    space = free_space(place)
    found = f"{place}, {format_bytes(space.free)} ({space.limit})"
    advice = "Large models do not fit. Set `cache` in the cluster file to another folder."
    return ok_if(space.free >= FEW_BYTES, "hub cache", found, advice)


def check_versions() -> Iterator[Finding]:
    """Report the installed libraries, and those that the tests did not run with or that break together."""
    for name, version in installed_versions(SUPPORTED).items():
        yield ok(name, version) if version else stops(name, "not installed", "Run `make install` again.")
    try:
        check_libraries()
    except ConfigError as error:
        found, _, advice = str(error).partition(". ")
        yield stops("versions", found, advice)
    for text in library_warnings():
        found, _, advice = text.partition(". ")
        yield warning("versions", found, advice)


def check_torch(cluster: Cluster | None) -> Iterator[Finding]:
    """Compare the build of torch with the cluster file and with the GPUs of this machine, if it has any."""
    cuda, gpus = installed_cuda(), list_gpus()
    wants_gpus = cluster is not None and not cluster.is_cpu
    if cuda is None and (wants_gpus or gpus):
        advice = "Run `make install CUDA=...` for the driver of the nodes; docs/get-started.md has a table."
        yield stops("CUDA of torch", "torch is a build without CUDA", advice)
    elif cuda is None:
        yield ok("CUDA of torch", "torch is a build for CPUs")
    elif not gpus:
        reason = f"torch is built for CUDA {cuda}; this machine has no GPU whose driver could be compared"
        yield not_checked("CUDA of torch", reason, "`shardmake doctor --node` compares it with the nodes' driver.")
    else:
        fine = ok("CUDA of torch", f"CUDA {cuda}, driver {gpus[0].driver}")
        yield from check_build(gpus, cuda, "CUDA of torch") or [fine]


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")
