"""Progress on stdout, warnings on stderr, as much as the command line asks for."""

import logging
import time

import pytest
from typer.testing import CliRunner

from shardmake.cli import app
from shardmake.core.log import configure_logging, warn_while_slow

logger = logging.getLogger("shardmake.core.example")


@pytest.mark.parametrize(("rank", "prefix"), [(None, ""), (3, "[rank 3] ")])
def test_warnings_go_to_stderr_with_a_rank(capsys: pytest.CaptureFixture[str], rank: int | None, prefix: str) -> None:
    configure_logging(rank=rank)
    logger.debug("details")
    logger.info("100 %% of %s", "[data]")
    logger.warning("almost full")
    assert capsys.readouterr() == (f"{prefix}100 % of [data]\n", f"{prefix}WARNING: almost full\n")


@pytest.mark.parametrize(("option", "level"), [
    ("--verbose", logging.DEBUG), ("-v", logging.DEBUG), ("--quiet", logging.WARNING), ("-q", logging.WARNING),
])  # fmt: skip
def test_options_of_the_command_line_set_the_level(option: str, level: int) -> None:
    """Also --quiet prints results."""
    assert "a100-80gb" in CliRunner().invoke(app, [option, "estimate", "--list-gpus"]).output
    assert logging.getLogger("shardmake").level == level


def test_slow_work_says_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    with warn_while_slow("Counting", first=0.01, later=3600):
        time.sleep(0.2)
    with warn_while_slow("Adding", first=3600):
        pass
    assert caplog.messages == ["Counting (0 s so far)"]


def test_of_nested_slow_work_the_innermost_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with warn_while_slow("Planning", first=0.01, later=0.01):
        with warn_while_slow("Counting", first=0.01, later=0.01):
            wait_for_lines(caplog, "Counting", 20)
        assert sum(line.startswith("Planning") for line in caplog.messages) <= 1  # one before the inner phase began
        wait_for_lines(caplog, "Planning", 2)


def wait_for_lines(caplog: pytest.LogCaptureFixture, what: str, count: int) -> None:
    while sum(line.startswith(what) for line in caplog.messages) < count:
        time.sleep(0.01)
