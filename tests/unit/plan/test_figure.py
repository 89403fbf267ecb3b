import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardmake.config.models import Run
from shardmake.core.units import format_bytes
from shardmake.plan.figure import CAPACITY_DRAWN, LEFT, WIDTH, bars, draw
from shardmake.plan.stage import make_plan
from shardmake.run.plan import MemoryEstimates, Plan
from tests.unit.plan.test_planner import TINY, gpus

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, MemoryEstimates]:
    """A plan of a model that is tiny beside the GPU."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY))
    values = {"model": str(folder), "data": {"train": "x"}, "sequence_length": 128, "global_batch_size": 32}
    return make_plan("docs & chat", Run(**values, max_steps=1, learning_rate=1e-4), gpus(max_nodes=1))


def test_each_strategy_has_a_bar_with_and_without_checkpointing(planned: tuple[Plan, MemoryEstimates]) -> None:
    plan, memory = planned
    rows = bars(memory.candidates, plan.choice)
    kinds = [(row.choice.strategy, row.choice.gradient_checkpointing) for row in rows]
    assert len(kinds) == len(set(kinds))
    assert set(kinds) == {(item.choice.strategy, item.choice.gradient_checkpointing) for item in memory.candidates}
    assert rows[0].choice == plan.choice


def with_memory(planned: tuple[Plan, MemoryEstimates], times: float) -> MemoryEstimates:
    """The estimates on a GPU with ``times`` the memory of the largest one."""
    largest = max(row.gpu.device for row in bars(planned[1].candidates, planned[0].choice))
    return planned[1].model_copy(update={"gpu_memory": int(times * largest)})


@pytest.mark.parametrize("times", [0.2, 0.9, 3, 5, 40, 1000])
def test_the_longest_bar_can_be_read_beside_any_memory(planned: tuple[Plan, MemoryEstimates], times: float) -> None:
    memory = with_memory(planned, times)
    root = ElementTree.fromstring(draw(memory, planned[0].choice))
    ends = [
        float(rect.get("x", "")) + float(rect.get("width", ""))
        for rect in root.iter(f"{SVG}rect")
        if rect.find(f"{SVG}title") is not None
    ]
    assert LEFT + WIDTH / 5 <= max(ends) <= LEFT + WIDTH
    limit = f"{format_bytes(memory.gpu_memory)} per rank"
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert limit in texts if times < CAPACITY_DRAWN else f"limit: {limit}" in texts
    assert len(root.findall(f"{SVG}line")) == (times < CAPACITY_DRAWN)


def test_bars_show_terms_and_the_line_shows_gpu_memory(planned: tuple[Plan, MemoryEstimates]) -> None:
    plan, memory = planned[0], with_memory(planned, 2)
    root = ElementTree.fromstring(draw(memory, plan.choice))
    texts = {text.text: text.get("font-weight") for text in root.iter(f"{SVG}text")}
    rows = bars(memory.candidates, plan.choice)
    assert texts[rows[0].name] == "bold"
    assert all(row.name in texts for row in rows)
    assert set(rows[0].gpu.terms) <= set(texts)
    assert f"{format_bytes(memory.gpu_memory)} per rank" in texts
    assert len(root.findall(f"{SVG}line")) == 1
    titled = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(titled) == sum(len(row.gpu.terms) + 1 for row in rows)


def test_the_figure_is_self_contained_and_deterministic(planned: tuple[Plan, MemoryEstimates], tmp_path: Path) -> None:
    plan, memory = planned
    text = draw(memory, plan.choice)
    assert "href" not in text
    assert text == draw(memory, plan.choice)
