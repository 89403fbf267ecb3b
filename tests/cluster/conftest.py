"""The cluster, for tests: ``cluster`` is up for the session, ``shared_folder`` is seen by all its nodes."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.harness import Cluster, available
from tests.cluster.lab import FaultLab, make_lab
from tests.cluster.peace import Peace


def require_cluster(*, accounting: bool = False) -> None:
    """Skip where no cluster can run; on CI (``CI=true``) fail, so that no test is lost there unnoticed."""
    if reason := available(accounting=accounting):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"a cluster needs {reason}")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The three-node cluster. ``SHARDMAKE_CLUSTER=reuse`` takes the one of ``python -m tests.cluster up``."""
    require_cluster()
    if os.environ.get("SHARDMAKE_CLUSTER") == "reuse":
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
def lab(cluster: Cluster, inputs: Path) -> Iterator[FaultLab]:
    """A checkout on the folder that all nodes share; tokenized data are shared by all trainings."""
    cluster.reset()
    lab = make_lab(cluster, cluster.shared / "faults", inputs)
    yield lab
    lab.repair()


@pytest.fixture(scope="session")
def in_peace(lab: FaultLab) -> Peace:
    """Undisturbed trainings, by strategy and length of the sequences."""
    return Peace(lab)
