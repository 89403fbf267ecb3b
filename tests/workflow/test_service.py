"""A script and its service on one machine: real processes, without Slurm (tests/cluster/test_service.py has the rest)."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.workflow.checkout import Checkout, wait_for
from tests.workflow.service_run import COMMAND, answers, assert_asked_in_every_step, ends, service_settings

pytestmark = [pytest.mark.training, pytest.mark.objectives]


@pytest.fixture
def prepared(checkout: Checkout) -> Checkout:
    """A checkout with a run of one second per step, up to its training."""
    checkout.configure(**service_settings(checkout, seconds=1.0))
    checkout.stages()
    return checkout


def test_a_killed_service_ends_the_attempt_and_the_next_one_has_another(prepared: Checkout, tmp_path: Path) -> None:
    driver = prepared.start("shardmake", "train", "demo", log=tmp_path / "driver.log")
    wait_for(lambda: len(answers(prepared)) >= 3)
    first = answers(prepared)[0]["server"]
    os.kill(first, signal.SIGKILL)
    assert driver.wait(300) == 0, (tmp_path / "driver.log").read_text()
    assert ends(prepared) == ["the service ended", "finished"]
    assert "was ended by SIGKILL before the training." in prepared.read("train/attempts/index.json")[0]["message"]
    assert_asked_in_every_step(prepared)
    second = answers(prepared)[-1]["server"]
    assert second != first and not psutil.pid_exists(second), "it ends with the training"
    assert "ended by SIGINT" in (prepared.run / "train/attempts/002/node-1.log").read_text()
    assert prepared.read("train/attempts/002/node-1.json")["phase"] == "service"


def test_the_driver_reports_a_service_that_loads_for_long(checkout: Checkout) -> None:
    checkout.configure(**service_settings(checkout, f"{COMMAND} --load_seconds 65"))
    checkout.stages()
    output = checkout("shardmake", "train", "demo").stdout
    assert "has been loading for 1 minute. Its last output: loading " in output and ends(checkout) == ["finished"]


def test_the_stop_file_ends_script_and_service(prepared: Checkout, tmp_path: Path) -> None:
    driver = prepared.start("shardmake", "train", "demo", log=tmp_path / "driver.log")
    wait_for(lambda: answers(prepared))
    prepared("shardmake", "stop", "demo")
    driver.wait(300)
    assert ends(prepared) == ["stop requested"]
    assert not psutil.pid_exists(answers(prepared)[0]["server"])
    prepared("shardmake", "train", "demo")
    assert ends(prepared) == ["stop requested", "finished"]
    assert_asked_in_every_step(prepared)


def test_the_plan_states_the_nodes_of_the_service_and_the_preview_its_command(prepared: Checkout) -> None:
    assert "1 more node for the service" in prepared("shardmake", "plan", "demo").stdout
    assert "service.py" in prepared("shardmake", "render", "demo", "--show").stdout
