"""One `Kit` for all checks; its report is written when they have ended."""

import time
from collections.abc import Iterator

import pytest

from shardmake.core.errors import ConfigError
from tests.gpu import results
from tests.gpu.checks import Kit
from tests.gpu.machine import find_machine

_outcomes: dict[str, str] = {}
_written: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep how each check ended."""
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid.rpartition("::")[2].removeprefix("test_")] = report.outcome


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    """The checks on this machine; without a GPU the session ends with a sentence and exit status 1."""
    try:
        machine = find_machine()
    except ConfigError as error:
        pytest.exit(str(error), returncode=1)
    kit = Kit(machine, tmp_path_factory.mktemp("gpu"))
    yield kit
    kit.add(seconds=time.time() - kit.report.time, outcomes=dict(_outcomes))
    path = results.write(kit.report)
    _written.extend([f"Wrote {path.relative_to(results.REPOSITORY)}. Its row for docs/gpu.md:", kit.report.row()])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print where the report is, and its row."""
    for line in _written:
        terminalreporter.write_line(line)
