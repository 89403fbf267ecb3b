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
    """Trainings that start within a second, because their ranks are forked from a process with all imports."""
    checkout = Checkout.create(tmp_path_factory.mktemp("forked") / "checkout", inputs)
    checkout("shardmake", "data", "demo")
    server = ForkServer()
    yield Forked(checkout, server)
    server.close()


@pytest.fixture(scope="session")
def shared_checkout(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Checkout:
    """A checkout with tokenized data, for trainings that are launched by hand."""
    checkout = Checkout.create(tmp_path_factory.mktemp("shared") / "checkout", inputs)
    configure(checkout, "ddp")
    checkout("shardmake", "data", "demo")
    return checkout


@pytest.fixture(scope="session")
def reference(shared_checkout: Checkout) -> dict[int, float]:
    """Losses under DDP; its final weights are in ``reference.safetensors`` of the shared checkout."""
    losses = train_by_hand(shared_checkout, "ddp")
    final = shared_checkout.run / f"train/checkpoints/checkpoint-{STEPS}/model.safetensors"
    shutil.copy(final, shared_checkout.root / "reference.safetensors")
    assert list(losses) == list(range(1, STEPS + 1))
    return losses
