"""A rank that computes slowly is named with its node, also by engines that gather the weights in its forward pass."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardmake.core.errors import STOPPED
from shardmake.run.usage import WINDOWS
from tests.cluster.fault_run import FaultRun

pytestmark = [pytest.mark.cluster, pytest.mark.training, pytest.mark.faults, pytest.mark.timeout(1800)]
PAUSE_OFTEN = """
import os, signal, sys, time
while True:
    for number, seconds in ((signal.SIGSTOP, 0.045), (signal.SIGCONT, 0.003)):
        os.kill(int(sys.argv[1]), number)
        time.sleep(seconds)
"""


@contextmanager
def slowed(run: FaultRun, rank: int) -> Iterator[str]:
    """Let a rank run in 3 ms of 48, less than its share of a core that all processes want; yield its node."""
    beat = run.beat(rank)
    assert beat
    pauses = run.cluster.popen([sys.executable, "-c", PAUSE_OFTEN, str(beat.pid)], node=beat.host)
    yield beat.host
    os.killpg(pauses.pid, signal.SIGKILL)
    pauses.wait()
    run.send("CONT", beat.pid, beat.host)


def wait_for_windows(run: FaultRun) -> None:
    """Wait until both ranks have timed their last windows from now on, the one that has begun left out."""
    known: list[tuple[float, ...]] = []

    def are_timed() -> bool:
        found = [beat.compute_seconds for beat in (run.beat(0), run.beat(1)) if beat]
        if len(found) == 2 and tuple(found[1]) not in known:
            known.append(tuple(found[1]))
        return len(known) > WINDOWS + 1 and all(len(times) == WINDOWS for times in found)

    run.cluster.wait_until(are_timed, "the windows of both ranks", timeout=900)


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp"])
def test_a_slow_rank_is_named_with_its_node_and_none_in_an_even_run(run: FaultRun, strategy: str) -> None:
    run.repair()
    run.remove_training()
    run.configure(strategy, max_steps=20_000, checkpoints={"every_steps": 1000}, hang_seconds=600)
    run.start()
    wait_for_windows(run)
    assert "times as long" not in run.checkout.on_login_node("shardmake", "status", "demo")
    with slowed(run, rank=1) as host:
        wait_for_windows(run)
        status = run.checkout.on_login_node("shardmake", "status", "demo")
    found = re.search(rf"Rank 1 on {host} computes (\d+\.\d) times as long as the median rank", status)
    assert found and float(found[1]) > 1.5
    (run.checkout.run / "train/STOP").touch()
    assert run.wait() == STOPPED, run.log()
