"""Fixtures of all tests: the demo's inputs, made once, and a fresh copy of the repository for each test."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from shardmake.core.environment import checkout_commit
from shardmake.core.permissions import private_folder
from shardmake.demo import make_inputs
from tests.tiers import GROUPS, belongs_to_make_test, group_of, takes_long
from tests.workflow.checkout import Checkout
from tools.fault_matrix import COMMIT, LOAD

# No deadline for an example: tests share two cores with trainings.
settings.register_profile("shardmake", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shardmake")
# Background jobs of a shell ignore SIGINT, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# As in an activated environment: DeepSpeed looks for ninja, which a bare machine has only there.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# Deprecated calls of our own lines are errors in every process of a test; Python compares whole names of modules.
_SOURCE = Path(__file__).parents[1] / "src"
_RANKS = [".".join(path.relative_to(_SOURCE).with_suffix("").parts) for path in _SOURCE.glob("shardmake/train/**/*.py")]
os.environ["PYTHONWARNINGS"] = ",".join(
    f"error::{kind}:{module}" for module in _RANKS for kind in ("DeprecationWarning", "FutureWarning")
)


@pytest.fixture(autouse=True)
def default_logging() -> Iterator[None]:
    """Undo `configure_logging` after each test, so that ``caplog`` receives the records of every test."""
    yield
    private_folder.cache_clear()  # pytest removed the folder, and the next test may get its name
    logger = logging.getLogger("shardmake")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that ``make test`` or CI leaves out; start the longest groups first, so that none is last."""
    items.sort(key=lambda item: [*GROUPS.values(), group := group_of(item.nodeid)].index(group))
    for item in items:
        if not belongs_to_make_test(item.nodeid):
            item.add_marker(pytest.mark.full)
            if takes_long(item.nodeid):
                item.add_marker(pytest.mark.long)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what only root can do."""
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("only root can mount a file system or act for other users")


class GroupScheduling(LoadScopeScheduling):
    """Send the tests of one group to one process of xdist, because they share an expensive fixture."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    """Take the groups of `group_of`; xdist's own groups by marker need an older pytest."""
    return GroupScheduling(config, log)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat data set, a tokenizer and a small base model."""
    folder = tmp_path_factory.mktemp("inputs") / "demo"
    with pytest.MonkeyPatch.context() as patched:  # disks and losses of the tests are for this size
        patched.setattr("shardmake.demo.inputs.VOCABULARY_SIZE", 4096)
        make_inputs(folder)
    return folder


@pytest.fixture
def checkout(tmp_path: Path, inputs: Path) -> Checkout:
    """A copy of the repository."""
    return Checkout.create(tmp_path / "checkout", inputs)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Let the report of a fault hold the commit and the load of the machine, for the heading of its table."""
    if item.get_closest_marker("faults"):
        item.user_properties += [(COMMIT, checkout_commit()), (LOAD, f"{os.getloadavg()[1]:.1f}")]
