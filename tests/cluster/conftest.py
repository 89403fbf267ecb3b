"""The cluster, for tests: ``cluster`` is up for the session, ``shared_folder`` is seen by all its nodes."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.baseline import BaselineRuns, caused, tolerances
from tests.cluster.fault_run import ClusterCheckout, FaultRun, make_fault_run
from tests.cluster.harness import REUSE, Cluster, available
from tools.fault_matrix import FAULT, TOLERANCE


def require_cluster(*, accounting: bool = False) -> None:
    """Skip if no cluster can run; fail on CI (``CI=true``), so that no test is skipped there unnoticed."""
    if reason := available(accounting=accounting):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"a cluster needs {reason}")


@pytest.fixture(autouse=True)
def record_comparison(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Let the report of a test hold its faults, and how exactly it compared a training with an undisturbed one."""
    tolerances.clear()
    caused.clear()
    yield
    for fault, seconds in caused.items():
        record_property(FAULT, f"{seconds:.0f} {fault}")
    if tolerances:
        record_property(TOLERANCE, max(tolerances))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The three-node cluster. ``SHARDMAKE_CLUSTER=reuse`` takes the one of ``python -m tests.cluster up``."""
    require_cluster()
    if REUSE:
        running = Cluster()
        running.attach()
        yield running
        running.leave_up()
        return
    with Cluster() as fresh:
        yield fresh


@pytest.fixture
def shared_folder(cluster: Cluster) -> Path:
    """An empty folder under the same name on every node (pytest's ``tmp_path`` lies in /tmp, which nodes have own)."""
    return Path(tempfile.mkdtemp(dir=cluster.shared))


@pytest.fixture(scope="session")
def run(cluster: Cluster, inputs: Path) -> Iterator[FaultRun]:
    """A checkout on the folder that all nodes share; tokenized data are shared by all trainings."""
    cluster.reset()
    run = make_fault_run(cluster, cluster.shared / "faults", inputs)
    yield run
    run.repair()


@pytest.fixture(scope="session")
def baseline_run(run: FaultRun) -> BaselineRuns:
    """Return undisturbed trainings by strategy and settings."""
    return BaselineRuns(run)


@pytest.fixture
def checkout(cluster: Cluster, shared_folder: Path, inputs: Path) -> Iterator[ClusterCheckout]:
    """A checkout on the shared folder; pytest shows its logs if the test fails."""
    cluster.reset()
    checkout = ClusterCheckout.create(shared_folder / "checkout", inputs)
    assert isinstance(checkout, ClusterCheckout)
    checkout.cluster = cluster
    checkout.shorten_waits()
    checkout.configure_cluster()
    yield checkout
    for log in sorted(checkout.root.glob("*.log")):
        print(f"{log.name}:\n{log.read_text(errors='replace')}")
    attempts = checkout.run / "train/attempts"
    for log in sorted([*attempts.glob("*/slurm/*.out"), *attempts.glob("*/node-*.log")]):
        print(f"{log.relative_to(checkout.run)}:\n{log.read_text(errors='replace')[-4000:]}")
