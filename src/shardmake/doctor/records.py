"""Files of `shardmake doctor --node`: what the login node asks for, and what each node reports."""

from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path

from pydantic import Field

from shardmake.config.models import Cluster
from shardmake.run.findings import Finding
from shardmake.run.paths import BelowRoot
from shardmake.run.record import RunRecord

MADE_BY = "shardmake doctor --node"


class DoctorRequest(RunRecord):
    """``request.json``: what the login node asks the nodes to check."""

    made_by = MADE_BY
    cluster: Cluster = Field(description="Cluster file, or what sinfo reports about a partition.")
    nodes: int = Field(description="Nodes of the job.")
    versions: dict[str, str] = Field(description="Libraries on the login node.")
    environment: str | None = Field(
        description="Folder of the login node's Python environment; None for nodes that run the checks in a container."
    )
    build_kernels: bool = Field(description="Compile DeepSpeed's Adam, and its asynchronous I/O if there is NVMe.")


class NodeFacts(RunRecord):
    """Measured values of one node, for the cluster file; None for what was not measured."""

    gpu_name: str | None = Field(None, description="Name of the GPU as the driver has it.")
    gpu_memory_gib: float | None = Field(None, description="Memory of a GPU as CUDA reports it.")
    driver: int | None = Field(None, description="Branch of the driver.")
    cuda: str | None = Field(None, description="CUDA version of torch.")
    nccl: str | None = Field(None, description="Version of NCCL.")
    intra_gbps: float | None = Field(None, description="Bus bandwidth of an all-reduce within the node, GB/s.")
    inter_gbps: float | None = Field(None, description="Bus bandwidth of an all-reduce over all nodes, GB/s.")
    network_interface: str | None = Field(None, description="Interface with which the nodes found each other.")
    nvme: dict[str, float] = Field(default_factory=dict, description="Free GiB of writable local NVMe, by mount point.")


class NodeReport(RunRecord):
    """``node-K.json``: the findings and values of one node, written last."""

    made_by = MADE_BY
    node_rank: int = Field(description="Rank of the node in the job.")
    host: str = Field(description="Host name.")
    findings: list[Finding] = Field(description="In the order of the checks.")
    facts: NodeFacts = Field(description="Values for the cluster file.")
    seconds: float = Field(description="Duration of all checks of this node.")


@dataclass(frozen=True)
class DoctorDir:
    """The folder of one check of nodes."""

    root: Path

    request = BelowRoot("request.json", "What the nodes check (`DoctorRequest`).")
    rendezvous = BelowRoot("rendezvous", "Folder of the rendezvous of the nodes.")
    shared = BelowRoot("shared", "Folder in which the nodes look for each other's files.")
    slurm = BelowRoot("slurm", "Folder of the batch script and the job's output.")
    trainings = BelowRoot("trainings", "Folder of the trainings of `--train`: configurations, logs, runs.")
    result = BelowRoot("report.json", "All findings of the login node and the nodes.")

    def _of_node(self, name: str, node_rank: int) -> Path:
        return self.root / name.format(node_rank)

    report = partialmethod(_of_node, "node-{}.json")
    """Return the path of a node's report."""
    network = partialmethod(_of_node, "network-{}.json")
    """Return the path of the bandwidths that a node's ranks measured."""
    log = partialmethod(_of_node, "node-{}.log")
    """Return the path of the output of a node's ranks and libraries."""
    nccl_log = partialmethod(_of_node, "nccl-{}.log")
    """Return the path of NCCL's log of a node's first rank."""
