"""Ranks that are forked from a process with everything imported, shared by all tests that train without a driver."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nursery import Nursery
from tests.workflow.checkout import Checkout
from tests.workflow.forked import Forked


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Iterator[Forked]:
    """Trainings that start in a second."""
    lab = Checkout.create(tmp_path_factory.mktemp("forked") / "checkout", inputs)
    lab("shardmake", "data", "demo")
    nursery = Nursery()
    yield Forked(lab, nursery)
    nursery.close()
