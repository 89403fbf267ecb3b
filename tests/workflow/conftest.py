"""Fixtures that several trainings of the tests share."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.workflow.by_hand import STEPS, configure, train_by_hand
from tests.workflow.checkout import Checkout
from tests.workflow.forked import Forked


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Iterator[Forked]:
    """Trainings that start in a second: their ranks are forked from a process with everything imported."""
    lab = Checkout.create(tmp_path_factory.mktemp("forked") / "checkout", inputs)
    lab("shardmake", "data", "demo")
    server = ForkServer()
    yield Forked(lab, server)
    server.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Checkout:
    """A checkout with tokenized data, for trainings by hand."""
    checkout = Checkout.create(tmp_path_factory.mktemp("lab") / "checkout", inputs)
    configure(checkout, "ddp")
    checkout("shardmake", "data", "demo")
    return checkout


@pytest.fixture(scope="session")
def reference(lab: Checkout) -> dict[int, float]:
    """Losses under DDP, whose weights at the end are then in ``reference.safetensors`` of the lab."""
    losses = train_by_hand(lab, "ddp")
    shutil.copy(lab.run / f"train/checkpoints/checkpoint-{STEPS}/model.safetensors", lab.root / "reference.safetensors")
    assert list(losses) == list(range(1, STEPS + 1))
    return losses
