"""The hardware of a node: sizes and link speeds from a cluster file."""

from dataclasses import dataclass

from shardmake.config.accelerators import Accelerator, find_accelerator
from shardmake.config.models import Cluster, Precision
from shardmake.core.units import GB, GIB


@dataclass(frozen=True)
class Hardware:
    """One cluster as the input of the estimates; bytes, FLOP/s and bytes per second."""

    accelerator: Accelerator
    gpu_memory: int
    """Memory of one rank: of its GPU, or on CPU its share of the node's RAM."""
    host_memory: int
    """RAM of a node."""
    nvme: int | None
    """Free NVMe space of a node; None if no folder is given."""
    processes_per_node: int
    cpus_per_node: int
    max_nodes: int
    intra_node: float
    inter_node: float

    @property
    def is_cpu(self) -> bool:
        """True if ranks run on the CPU."""
        return self.accelerator.is_cpu

    def flops(self, precision: Precision, *, tf32: bool = False) -> float:
        """Return the dense peak of one rank, FLOP/s."""
        cores = self.cpus_per_node / self.processes_per_node if self.is_cpu else 1
        return self.accelerator.flops(precision, tf32=tf32) * cores


def from_cluster(cluster: Cluster) -> Hardware:
    """Return the hardware that a cluster file describes."""
    accelerator = find_accelerator(cluster.accelerator)
    host = int(cluster.memory_gib_per_node * GIB)
    on_gpu = int((cluster.gpu_memory_gib or accelerator.memory) * GIB)
    nvme = int(cluster.nvme_gib_per_node * GIB) if cluster.nvme_gib_per_node else 1 << 62
    return Hardware(
        accelerator=accelerator,
        gpu_memory=host // cluster.processes_per_node if accelerator.is_cpu else on_gpu,
        host_memory=host,
        nvme=None if cluster.nvme_path is None else nvme,
        processes_per_node=cluster.processes_per_node,
        cpus_per_node=cluster.cpus_per_node,
        max_nodes=cluster.max_nodes,
        intra_node=(cluster.intra_node_gbps or accelerator.link) * GB,
        inter_node=cluster.inter_node_gbps * GB,
    )
