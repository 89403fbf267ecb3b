"""The checks of one compute node: ``python -m shardmake.doctor.node FOLDER NODE_RANK``, or one task of a Slurm job."""

import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardmake.core.environment import kernel_caches, scratch_folder
from shardmake.doctor import host, kernels, network
from shardmake.doctor.records import DoctorDir, DoctorRequest, NodeFacts, NodeReport
from shardmake.launch import gpus
from shardmake.launch.gpu_status import installed_cuda
from shardmake.launch.rendezvous import Rendezvous, RendezvousError, run_rendezvous
from shardmake.run.attempt import host_name
from shardmake.run.findings import Check, Finding, Verdict, not_checked, run_checks, stops

RENDEZVOUS_SECONDS = 180.0
_OPTIONAL = {
    "Liger": "`loss: fused`",
    "bitsandbytes": " or ".join(kernels.BITSANDBYTES),
    "CPU Adam": "a strategy with offload",
    "NVMe I/O": "a strategy with offload to NVMe",
}
"""Settings that need a check to pass; every other check concerns every run."""


def run_task(folder: str) -> None:
    """Check the node of this Slurm task, which submitit has pickled."""
    check_node(DoctorDir(Path(folder)), int(os.environ["SLURM_PROCID"]))


def check_node(folder: DoctorDir, node_rank: int) -> None:
    """Run every check of this node and write its report, whatever fails."""
    started = time.monotonic()
    request = DoctorRequest.read(folder.request)
    node = _NodeCheck(request, folder, node_rank)
    try:
        findings = node.run()
    except Exception as error:  # the login node must get a report
        traceback.print_exc()
        failure = not_checked("node", f"{type(error).__name__}: {error}", "This is a bug: report it.")
        findings = [*node.findings, failure]
    host, seconds = host_name(), time.monotonic() - started
    found = [finding.model_copy(update={"nodes": (host,)}) for finding in findings]
    report = NodeReport(node_rank=node_rank, host=host, findings=found, facts=node.facts, seconds=seconds)
    report.write(folder.report(node_rank))


class _NodeCheck:
    """The checks of one node in their order, and what they have found so far."""

    def __init__(self, request: DoctorRequest, folder: DoctorDir, node_rank: int) -> None:
        self.request, self.folder, self.node_rank = request, folder, node_rank
        self.findings: list[Finding] = []
        self.facts = NodeFacts()
        accelerator = {"DS_ACCELERATOR": "cpu"} if request.cluster.is_cpu else {}
        self.variables = {**kernel_caches(request.cluster.scratch), **accelerator, **request.cluster.variables}

    def run(self) -> list[Finding]:
        """Return all findings. The network comes first, because the nodes meet for it at the same time."""
        self.findings += self._check_network()
        compilers = {"compilers": lambda: host.check_build_tools(self.request, os.environ | self.variables)}
        self.findings += run_checks(host.host_checks(self.request, self.folder.root) | compilers)
        self._add(nvme=host.writable_nvme())
        visible, ranks = os.environ.get("CUDA_VISIBLE_DEVICES"), self.request.cluster.processes_per_node
        check: dict[str, Check] = {"GPUs": lambda: gpus.check_nvidia_smi(visible, ranks, installed_cuda())}
        if self.request.cluster.is_cpu:
            check = {"GPUs": lambda: not_checked("GPUs", "the cluster file has accelerator: cpu")}
        self.findings += run_checks(check)
        self.findings += self._check_kernels()
        return self.findings

    def _add(self, **values: object) -> None:
        self.facts = NodeFacts.model_validate({**self.facts.as_json(), **values})

    def _check_network(self) -> Iterator[Finding]:
        request, interface = self.request, self.request.cluster.network_interface
        try:
            found = run_rendezvous(
                self.folder.rendezvous, 0, self.node_rank, request.nodes, interface, RENDEZVOUS_SECONDS
            )
        except RendezvousError as error:
            advice = "Check network_interface in the cluster file and the firewall between nodes."
            yield stops("rendezvous", str(error), advice)
            return
        self._add(network_interface=found.interface if request.nodes > 1 else None)
        shared = self.folder.shared
        checks: dict[str, Check] = {
            "files of other nodes": lambda: host.check_visibility(shared, self.node_rank, request.nodes),
            "file locks of nodes": lambda: host.check_shared_lock(shared, self.node_rank, request.nodes),
            "all-reduce": lambda: self._measure(found),
        }
        yield from run_checks(checks)

    def _measure(self, rendezvous: Rendezvous) -> Iterable[Finding]:
        findings, bandwidths = network.run_ranks(self.request, self.folder, self.node_rank, rendezvous, self.variables)
        if bandwidths:
            self._add(intra_gbps=bandwidths.intra, inter_gbps=bandwidths.inter)
        return findings

    def _check_kernels(self) -> Iterator[Finding]:
        """Run the checks that use torch; the builds take longest and run beside the others."""
        names = kernels.BUILDS if self.request.cluster.nvme_path else ["CPU Adam"]
        builds = [self._start(name) for name in names] if self.request.build_kernels else []
        for name in () if self.request.cluster.is_cpu else kernels.ON_GPU:
            result = self._start(name).result(kernels.CHECK_SECONDS)
            self._add(**result.facts.model_dump(exclude_defaults=True))
            yield from map(without_optional, result.findings)
        if not self.request.build_kernels:
            yield not_checked("kernel builds", "--skip-builds was given")
        for build in builds:
            yield from map(without_optional, build.result(kernels.BUILD_SECONDS).findings)

    def _start(self, name: str) -> kernels.RunningCheck:
        folder = self.folder.root / f"kernels-{self.node_rank}"
        folder.mkdir(exist_ok=True)
        scratch = scratch_folder(self.request.cluster.scratch)
        return kernels.RunningCheck(name, self.folder.request, folder, scratch, self.variables)


def without_optional(finding: Finding) -> Finding:
    """Return the finding; a failure of something that only some settings need becomes a warning that names them."""
    if finding.verdict is not Verdict.STOPS or finding.check not in _OPTIONAL:
        return finding
    advice = f"Only {_OPTIONAL[finding.check]} needs it. {finding.advice}"
    return finding.model_copy(update={"verdict": Verdict.WARNING, "advice": advice})


if __name__ == "__main__":
    check_node(DoctorDir(Path(sys.argv[1])), int(sys.argv[2]))
