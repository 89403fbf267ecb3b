"""Processes that share an evaluation. They import this file, so it imports little."""

import time

import pytest

from shardmake.evaluate.assess import in_processes
from shardmake.evaluate.scores import PassOutOfMemoryError


def wait_or_fail(seconds: float) -> float:
    if not seconds:
        raise PassOutOfMemoryError(4096)
    time.sleep(seconds)
    return seconds


def test_a_failing_rank_ends_the_ranks_that_wait_for_it() -> None:
    started = time.monotonic()
    with pytest.raises(PassOutOfMemoryError) as raised:
        in_processes(wait_or_fail, [300.0, 0.0])
    assert raised.value.tokens == 4096 and time.monotonic() - started < 200
    assert in_processes(wait_or_fail, [0.2, 0.1]) == [0.2, 0.1]
