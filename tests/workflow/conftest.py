"""Fixtures that several trainings of the tests share."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardmake.plan import refusals
from tests.fork_server import REPOSITORY, ForkServer
from tests.workflow.by_hand import STEPS, configure, train_by_hand
from tests.workflow.checkout import Checkout
from tests.workflow.forked import Forked

if TYPE_CHECKING:
    from tests.workflow.objectives import Trainings

PACKAGES = Path(os.environ.get("BITSANDBYTES", REPOSITORY / ".venv/bitsandbytes"))
SECRETS = {
    "HF_TOKEN": "hf_Wq3TfEaYk2MdL9xPzRbNcUvHs", "AWS_SECRET_ACCESS_KEY": "x7Kq/2mPZ0aV+planted",
    "WANDB_API_KEY": "9f8e7d6c5b" * 4,
}  # fmt: skip


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def file_system(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a separate file system of a given size."""
    point = tmp_path / "small"

    def mount(size: str) -> Path:
        point.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", point], check=True)
        return point

    yield mount
    subprocess.run(["umount", "--lazy", point], check=True)


@pytest.fixture
def loading_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.workflow.consolidate_checkpoints import check_loading_in_process

    check_loading_in_process(monkeypatch)


@pytest.fixture
def variant_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, str], Path]:
    """Return the folder of a variant of `consolidate_checkpoints`, by script, ranks and name."""
    from tests.workflow.consolidate_checkpoints import trained

    return lambda script, world, name: trained(tmp_path_factory.getbasetemp(), script, world) / name


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Iterator[Forked]:
    """Trainings that start within a second, because their ranks are forked from a process with all imports."""
    checkout = Checkout.create(tmp_path_factory.mktemp("forked") / "checkout", inputs)
    checkout("shardmake", "data", "demo")
    server = ForkServer()
    yield Forked(checkout, server)
    server.close()


@pytest.fixture(scope="module")
def quantizing(forked: Forked) -> Iterator[Forked]:
    """Trainings whose ranks import bitsandbytes; plans are made as if it were installed and the cluster had GPUs."""
    if not (PACKAGES / "bitsandbytes").is_dir():
        pytest.fail(f"bitsandbytes is not in {PACKAGES}. Run: make {PACKAGES.name}")
    server = ForkServer("tests.bitsandbytes_on_cpu", packages=PACKAGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refusals, "wrong_on_cpu", lambda run: ())
        patch.setattr(refusals, "wrong_packages", lambda run: ())
        yield Forked(forked.checkout, server)
    server.close()


@pytest.fixture(scope="module")
def trainings(
    request: pytest.FixtureRequest, forked: Forked, tmp_path_factory: pytest.TempPathFactory, inputs: Path
) -> "Trainings":
    """Checkouts with the examples of each objective."""
    from tests.workflow.objectives import Trainings, with_examples

    def checkout(objective: str, four_bits: bool) -> Forked:
        server = request.getfixturevalue("quantizing").server if four_bits else forked.server
        own = Checkout.create(tmp_path_factory.mktemp(objective) / "checkout", inputs)
        return with_examples(objective, Forked(own, server), inputs)

    return Trainings(cache(checkout), tmp_path_factory.mktemp("trl"))


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
