"""All-reduces within a node and over all nodes; ``python -m shardmake.doctor.network OUTPUT`` is one rank."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from pydantic import Field

from shardmake.config.accelerators import find_accelerator
from shardmake.config.models import Cluster
from shardmake.core.process import die_with_parent
from shardmake.core.units import MIB
from shardmake.doctor.kernels import describe_failure
from shardmake.doctor.records import MADE_BY, DoctorDir, DoctorRequest
from shardmake.launch.rendezvous import Rendezvous
from shardmake.run.findings import Finding, not_checked, ok, stops, warning
from shardmake.run.record import RunRecord

GPU_BYTES = 1024 * MIB
CPU_BYTES = 16 * MIB
"""Gloo moves about 1 GB/s."""
_JOIN_SECONDS = 120
NETWORK_SECONDS = 240.0
SLOW_INTRA = 0.6
"""Part of the GPU model's link below which an all-reduce within the node counts as slow."""
SLOW_INTER = 0.25
"""Part of the cluster file's bandwidth below which an all-reduce between nodes counts as slow."""


class Bandwidths(RunRecord):
    """``network-K.json``: the bus bandwidths that the ranks of a node measured, in GB/s."""

    made_by = MADE_BY
    backend: str = Field(description="`nccl` or `gloo`.")
    size: int = Field(description="Bytes of each all-reduce.")
    intra: float | None = Field(description="Over the ranks of this node.")
    inter: float | None = Field(description="Over all ranks of all nodes.")


def main(output: str) -> None:
    """Measure as one rank; the first rank of a node writes ``output``."""
    import torch
    import torch.distributed as dist

    from shardmake.train.network_check import all_reduce_seconds, bus_bandwidth

    def measure(group: dist.ProcessGroup | None, ranks: int) -> float:
        return bus_bandwidth(all_reduce_seconds(tensor, NETWORK_SECONDS, group), size, ranks) / 1e9

    local, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    world = int(os.environ["WORLD_SIZE"])
    on_cpu = os.environ["SHARDMAKE_DOCTOR_BACKEND"] == "gloo"
    device = torch.device("cpu" if on_cpu else f"cuda:{local}")
    if not on_cpu:
        torch.cuda.init()  # its error says more than that of a library
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=_JOIN_SECONDS)
    dist.init_process_group("gloo" if on_cpu else "nccl", timeout=timeout, device_id=None if on_cpu else device)
    size = CPU_BYTES if on_cpu else GPU_BYTES
    tensor = torch.ones(size // 4, device=device)
    within, _ = dist.new_subgroups(ranks) if ranks < world else (None, None)
    intra = measure(within, ranks) if ranks > 1 else None
    inter = measure(None, world) if ranks < world else None
    if local == 0:
        Bandwidths(backend="gloo" if on_cpu else "nccl", size=size, intra=intra, inter=inter).write(Path(output))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(
    request: DoctorRequest, folder: DoctorDir, node_rank: int, rendezvous: Rendezvous, variables: dict[str, str]
) -> tuple[list[Finding], Bandwidths | None]:
    """Run the ranks of this node, and return the findings and what they measured."""
    ranks = request.cluster.processes_per_node
    if request.nodes * ranks == 1:
        return [not_checked("all-reduce", "there is one rank", "Use nodes with several GPUs, or `--nodes 2`.")], None
    output, log = folder.network(node_rank), folder.log(node_rank)
    with log.open("w") as file:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "shardmake.doctor.network", str(output)],
                env={**os.environ, **variables, **_rank_variables(request, folder, node_rank, local, rendezvous)},
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )
            for local in range(ranks)
        ]
    status = _wait(processes, NETWORK_SECONDS)
    found = Bandwidths.read_if_exists(output) if status == 0 else None
    if found is None:
        if status is None:
            advice = f"Check the network of these nodes and network_interface. {log} and {folder.nccl_log(node_rank)}."
            return [stops("all-reduce", f"it did not end within {NETWORK_SECONDS:.0f} s", advice)], None
        return [describe_failure("all-reduce", status, log, first=True)], None
    log = folder.nccl_log(node_rank)
    transports = parse_transports(log.read_text(errors="replace") if log.is_file() else "")
    return judge_bandwidths(found, request.cluster, transports), found


def _rank_variables(
    request: DoctorRequest, folder: DoctorDir, node_rank: int, local: int, rendezvous: Rendezvous
) -> dict[str, str]:
    ranks = request.cluster.processes_per_node
    interface = {"NCCL_SOCKET_IFNAME": f"={rendezvous.interface}", "GLOO_SOCKET_IFNAME": rendezvous.interface}
    return {
        "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH",
        "NCCL_DEBUG_FILE": str(folder.nccl_log(node_rank) if local == 0 else os.devnull),
        **{name: value for name, value in interface.items() if name not in os.environ | request.cluster.variables},
        "MASTER_ADDR": rendezvous.address, "MASTER_PORT": str(rendezvous.port),
        "RANK": str(node_rank * ranks + local), "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(request.nodes * ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
        "SHARDMAKE_DOCTOR_BACKEND": "gloo" if request.cluster.is_cpu else "nccl",
    }  # fmt: skip


def _wait(processes: Sequence["subprocess.Popen[bytes]"], seconds: float) -> int | None:
    """Return the status of the first rank that failed, 0 if none did, None after ``seconds``; no rank is left."""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            states = [process.poll() for process in processes]
            if failed := [status for status in states if status]:
                return failed[0]
            if all(status == 0 for status in states):
                return 0
            time.sleep(0.1)
        return None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def parse_transports(text: str) -> list[str]:
    """Return the transports in NCCL's log, such as ``P2P``, ``SHM``, ``NET/IB``, ``GDRDMA``, ``NVLS``."""
    found = {match[1] for match in re.finditer(r"via (P2P|SHM|NET/[A-Za-z_]+)", text)}
    if re.search(r"via NET/\S*GDRDMA", text):
        found.add("GDRDMA")
    if re.search(r"\b[1-9]\d* nvls channels", text):
        found.add("NVLS")
    return sorted(found)


def judge_bandwidths(found: Bandwidths, cluster: Cluster, transports: Sequence[str]) -> list[Finding]:
    """Compare the bandwidths with the GPU model's link and with the cluster file."""
    used = f" ({', '.join(transports)})" if transports else ""
    how = f"GB/s for {found.size // MIB} MiB with {found.backend}{used}"
    return [_judge_intra(found.intra, cluster, transports, how), _judge_inter(found.inter, cluster, transports, how)]


def _judge_intra(rate: float | None, cluster: Cluster, transports: Sequence[str], how: str) -> Finding:
    name, link = "all-reduce in the node", find_accelerator(cluster.accelerator).link
    if rate is None:
        return not_checked(name, "there is one rank per node")
    found = f"{rate:.2f} {how}"
    if cluster.is_cpu or rate >= SLOW_INTRA * link:
        return ok(name, found)
    advice = "Check `nvidia-smi topo -m` and `nvidia-smi nvlink -s`, and that NCCL_P2P_DISABLE is not set."
    without = "; NCCL does not use P2P" if transports and "P2P" not in transports and "NVLS" not in transports else ""
    return warning(name, f"{found}; the link of {cluster.accelerator} has {link:g} GB/s{without}", advice)


def _judge_inter(rate: float | None, cluster: Cluster, transports: Sequence[str], how: str) -> Finding:
    name = "all-reduce of the nodes"
    if rate is None:
        return not_checked(name, "the job has one node", "Run it again with `--nodes 2`.")
    found = f"{rate:.2f} {how}"
    if "NET/Socket" in transports and Path("/sys/class/infiniband").is_dir():
        advice = "Check NCCL_IB_DISABLE, NCCL_IB_HCA and the limit of locked memory."
        return warning(name, f"{found}; NCCL uses sockets although there is InfiniBand", advice)
    if not cluster.is_cpu and rate < SLOW_INTER * cluster.inter_node_gbps:
        advice = "Set inter_node_gbps to what was measured, or check the network and network_interface."
        return warning(name, f"{found}; the cluster file has {cluster.inter_node_gbps:g} GB/s", advice)
    return ok(name, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
