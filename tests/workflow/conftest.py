"""What several trainings of the tests share."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nursery import Nursery
from tests.workflow.by_hand import STEPS, configure, train_by_hand
from tests.workflow.checkout import Checkout
from tests.workflow.forked import Forked

SHARING = {"forked": "forked", "lab": "lab"}
"""Fixtures that are dear, and the group of the tests that share one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that share something in one of the processes that run side by side."""
    for item in items:
        assert isinstance(item, pytest.Function)
        dear = [group for fixture, group in SHARING.items() if fixture in item.fixturenames]
        consolidates = item.path.name.startswith("test_consolidate")
        item.add_marker(pytest.mark.xdist_group("consolidate" if consolidates else dear[0] if dear else item.path.name))


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Iterator[Forked]:
    """Trainings that start in a second: their ranks are forked from a process with everything imported."""
    lab = Checkout.create(tmp_path_factory.mktemp("forked") / "checkout", inputs)
    lab("shardmake", "data", "demo")
    nursery = Nursery()
    yield Forked(lab, nursery)
    nursery.close()


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
