"""A recipe's row has the figures of the printed plan, and the page has a row for each recipe."""

from pathlib import Path

from shardmake.plan.stage import describe
from shardmake.run.paths import RunDir
from shardmake.run.plan import MemoryEstimates
from tests.unit.plans import make_plan
from tools.recipes_page import PAGE, RECIPES, row


def test_the_row_has_the_figures_of_the_printed_plan(tmp_path: Path) -> None:
    reason = (
        "fsdp, checkpointing, micro batch 2, 2 nodes: about 6.5 s per step and 61.0 to 70.5 of 80.0 GiB per GPU, the"
    )
    changes = {"reason": f"{reason} only candidate that fits on 2 nodes.", "not_checked": ["the disk"]}
    plan = make_plan("fsdp", gradient_checkpointing=True).model_copy(update=changes)
    rundir = RunDir(tmp_path)
    rundir.plan.parent.mkdir()
    MemoryEstimates(model="", parameters=1, trainable=1, gpu_memory=1, host_memory=1, candidates=[]).write(
        rundir.memory
    )
    cells = row(RECIPES / "qwen3-8b-long.yaml", describe(plan, rundir)).strip("| \n").split(" | ")
    assert cells[0].startswith("`qwen3-8b-long`: Sequences of 131,072 tokens")
    assert cells[1] == "`h100`" and cells[2] == "Qwen3-8B"
    assert cells[3:] == ["fsdp, re", "2 x 2", "2", "6.5", "61.0 to 70.5 of 80.0", "8"]


def test_the_page_has_a_row_for_each_recipe() -> None:
    rows = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert rows == [path.stem for path in sorted(RECIPES.glob("*.yaml"))] and len(rows) == 12
