"""The worked example in the documentation: what its page says is what the plan gives."""

import re
from pathlib import Path

import pytest

from shardmake.config.load import get_run, load_cluster, load_config
from shardmake.core.units import GIB
from shardmake.plan.candidates import Candidate
from shardmake.plan.planner import Planner
from shardmake.plan.stage import ChosenRun, choose_run
from shardmake.plan.verdict import Headroom
from shardmake.report.flops import flops_per_token

FOLDER = Path(__file__).parents[3] / "examples" / "llama-2-70b"
PEAK = 16 * 312e12


@pytest.fixture(scope="module")
def planned() -> ChosenRun:
    run = get_run(load_config(FOLDER / "config.yaml"), "llama-2-70b")
    return choose_run(run.model_copy(update={"model": str(FOLDER / "model")}), load_cluster(FOLDER / "cluster.yaml"))


@pytest.fixture(scope="module")
def page() -> str:
    return " ".join((FOLDER / "README.md").read_text().split())


def _offloads(planned: ChosenRun) -> list[Candidate]:
    safer = (item for item in planned.candidates if item.headroom > planned.chosen.headroom)
    return [item for item in safer if item.choice.spec.offload_optimizer]


def _zero3(planned: ChosenRun) -> Candidate:
    found = (item for item in planned.candidates if item.choice.strategy == "zero3")
    return next(item for item in found if item.choice.gradient_checkpointing)


def test_the_plan_takes_what_was_published(planned: ChosenRun) -> None:
    choice = planned.chosen.choice
    assert (choice.strategy, choice.gradient_checkpointing, choice.micro_batch_size) == ("fsdp", True, 1)
    assert [item.choice.strategy for item in planned.fallbacks][-1] == "fsdp-offload"
    assert min(item.step_seconds for item in _offloads(planned)) > 1.5 * planned.chosen.step_seconds
    zero3 = Planner(planned.settings).simulate(_zero3(planned).choice)
    assert zero3.fits and planned.chosen.step_seconds < zero3.step_seconds < 1.25 * planned.chosen.step_seconds


def test_the_page_has_the_figures_of_the_plan(planned: ChosenRun, page: str) -> None:
    """Within 5 %, so that a small change of the memory model does not need a new page."""
    reported, seconds = re.search(r"seconds per step \| (.+?) \| ([\d.]+) \|", page).groups()  # type: ignore[union-attr]
    assert float(seconds) == pytest.approx(planned.chosen.step_seconds, rel=0.05)
    memory = re.search(r" to ([\d.]+) of 79.1 GiB per GPU, tight", page)
    assert float(memory[1]) == pytest.approx(planned.chosen.memory.gpu.device / GIB, rel=0.05)  # type: ignore[index]
    assert planned.chosen.headroom >= Headroom.TIGHT
    simulated = Planner(planned.settings).simulate(_zero3(planned).choice)
    stated = {
        r"`zero3`: ([\d.]+) GiB": simulated.memory.gpu.device / GIB,
        r"`fsdp-offload` with ([\d.]+) GiB": planned.fallbacks[-1].memory.gpu.device / GIB,
        r"(\d+) GiB per node": planned.chosen.memory.host.total / GIB,
        r"times as long \(([\d.]+) s\)": min(item.step_seconds for item in _offloads(planned)),
    }
    for pattern, value in stated.items():
        assert float(re.search(pattern, page)[1]) == pytest.approx(value, rel=0.05)  # type: ignore[index]
    flops = flops_per_token(planned.settings.model, "full", 1024) * 16 * 2048
    assert flops == pytest.approx(1.38e16, rel=0.01) and "97 from" in reported and round(13.5 * 3600 / 500) == 97
    assert "6.1 from an MFU" in reported and flops / (0.455 * PEAK) == pytest.approx(6.1, abs=0.05)
    assert flops / (97.2 * PEAK) == pytest.approx(0.028, abs=0.001)
    assert flops / (planned.chosen.step_seconds * PEAK) == pytest.approx(0.22, abs=0.02)
