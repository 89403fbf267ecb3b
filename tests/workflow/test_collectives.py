"""The collectives that Shardmake adds to a training are those of their page."""

from pathlib import Path

import pytest

from tests.collectives import PAGE, STRATEGIES, places, record_training, row
from tests.workflow.forked import Forked

pytestmark = pytest.mark.training


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_collective_of_a_training_is_on_the_page(forked: Forked, tmp_path: Path, strategy: str) -> None:
    """If this fails: python -m tests.collectives"""
    recorded = record_training(forked, tmp_path / "run", strategy)
    here = [line.rpartition(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    expected = {cells for cells, _, who in here if strategy in who.strip(" |").split(", ") or who.startswith("all")}
    assert {f"| {row(call)}" for call in recorded} == expected
    assert any(call.place.startswith("train.network_check.") for call in recorded)


def test_every_function_with_a_collective_is_on_the_page() -> None:
    """Those that the trainings do not reach, too."""
    text = PAGE.read_text()
    assert [place for place in sorted(places()) if f"`{place}`" not in text] == []
