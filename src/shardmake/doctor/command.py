"""The command `shardmake doctor`: run the checks, print or return them, and write the cluster file."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmake.config.load import load_cluster, load_config
from shardmake.config.models import Cluster
from shardmake.core.atomic import write_json, write_text
from shardmake.core.errors import ConfigError
from shardmake.doctor.cluster_file import compose, draft_cluster, require_free, write_cluster
from shardmake.doctor.job import check_nodes, make_request
from shardmake.doctor.login import login_checks
from shardmake.doctor.options import Options
from shardmake.doctor.records import DoctorDir, DoctorRequest, NodeReport
from shardmake.doctor.trainings import make_report, train_strategies
from shardmake.launch.container import check_container
from shardmake.plan.limits import query_partitions
from shardmake.run.findings import Finding, Verdict, merge_nodes, not_checked, ok, run_checks, would_stop

logger = logging.getLogger(__name__)
_BEFORE_A_JOB = ("Slurm", "accounts", "qos", "partitions", "shared folder")
"""Checks of the login node whose failure means that a job cannot run."""


@dataclass
class Result:
    """All findings, and the cluster file if one was written."""

    login: list[Finding]
    nodes: list[Finding]
    cluster_file: Path | None = None
    folder: Path | None = None

    @property
    def findings(self) -> list[Finding]:
        """Return the findings of the login node and of the nodes."""
        return [*self.login, *self.nodes]

    @property
    def exit_status(self) -> int:
        """Return 1 if something would stop a run, else 0."""
        return int(would_stop(self.findings))

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        return {
            "would_stop_a_run": would_stop(self.findings),
            "login_node": [finding.as_json() for finding in self.login],
            "compute_nodes": [finding.as_json() for finding in self.nodes],
            "cluster_file": self.cluster_file and str(self.cluster_file),
            "folder": self.folder and str(self.folder),
        }


def named_cluster(options: Options) -> Cluster | None:
    """Return the cluster of ``--cluster`` or ``--config``, which exclude each other; None if neither is given."""
    if options.cluster and options.config:
        raise ConfigError("--cluster and --config both name a cluster. Use one of them.")
    if not (options.cluster or options.config):
        return None
    if names := options.slurm.model_dump(exclude_unset=True):
        given = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise ConfigError(f"{given}: the cluster file has these settings. Edit the file, or do not name it.")
    return load_cluster(options.cluster or Path(load_config(*options.config).cluster))


def check_login(options: Options) -> list[Finding]:
    """Return the findings of this machine; it submits nothing."""
    if options.train and not options.node:
        raise ConfigError("--train trains on compute nodes. Add --node.")
    cluster = named_cluster(options)
    return run_checks(login_checks(cluster, cluster.slurm if cluster else options.slurm, Path.cwd()))


def _train(text: str, request: DoctorRequest, reports: Sequence[NodeReport], folder: DoctorDir) -> Iterator[Finding]:
    """Train on the nodes that ``text``, a cluster file, describes; write the report and yield the findings."""
    if not text:
        yield not_checked("trainings", "there is no cluster file for them")
        return
    begun, file = time.time(), folder.trainings / "cluster.yaml"
    write_text(file, text)
    cluster = load_cluster(file)
    findings, trained = train_strategies(cluster, file, request.nodes, folder.trainings)
    report = make_report(cluster, [one.facts for one in reports], findings, trained, request.nodes, begun)
    report.write(folder.root / report.name)
    yield from findings
    yield ok("row of docs/gpu.md", f"{folder.root / report.name}: {report.row()}")


def check_compute_nodes(options: Options, login: list[Finding]) -> Result:
    """Check nodes with one job, write its JSON and the cluster file, and return everything.

    Raises `ConfigError` if ``login``, the checks of the login node, say that no job can run.
    """
    written = options.written
    if written:
        require_free(written, force=options.force)
    for finding in login:
        if finding.verdict is Verdict.STOPS and finding.check in _BEFORE_A_JOB:
            raise ConfigError(f"No job was submitted: {finding.check}: {finding.found}. {finding.advice}")
    cluster = named_cluster(options)
    drafted = cluster is None
    if cluster is None:
        cluster = draft_cluster(options.slurm, query_partitions())
    nodes = 1 if cluster.executor == "local" else options.nodes
    check_container(cluster)
    folder = DoctorDir(options.folder.absolute() / time.strftime("%Y%m%d-%H%M%S"))
    request = make_request(cluster, nodes, build_kernels=not options.skip_builds)
    reports, missing = check_nodes(request, folder)
    result = Result(login, merge_nodes([finding for report in reports for finding in report.findings]) + missing)
    result.folder = folder.root
    if reports:
        text, findings = compose(request, reports, drafted=drafted)
        result.nodes += findings
        if text and written:
            write_cluster(written, text, force=options.force)
            result.cluster_file = written
            result.nodes.append(ok("cluster file", f"wrote {written}"))
        result.nodes += _train(text, request, reports, folder) if options.train else []
    durations = [{"host": one.host, "seconds": one.seconds, "facts": one.facts.as_json()} for one in reports]
    write_json(folder.result, result.as_json() | {"reports": durations})
    return result
