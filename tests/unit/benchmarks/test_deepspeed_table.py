import csv
import re
from pathlib import Path

import pytest

from benchmarks.deepspeed_table import Needs, needs, table
from shardmake.core.units import GIB

T0_3B = (2_783_959_040, 65_798_144)
TRUTH = Path(__file__).parents[3] / "benchmarks" / "data" / "memory_truth.csv"


def printed(text: str) -> list[tuple[str, ...]]:
    """Host, GPU and zero_init of each line; DeepSpeed 0.19 spells its options as the names of an enumeration."""
    return re.findall(r"(\d+\.\d\d)GB \| +(\d+\.\d\d)GB .*zero_init=(\d)", text)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 2), (2, 8)])
@pytest.mark.parametrize(("total", "largest"), [T0_3B, (8_030_261_248, 525_336_576)])
def test_the_table_matches_deepspeed_to_the_digit(
    nodes: int, gpus: int, total: int, largest: int, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold

    estimate_zero3_model_states_mem_needs_all_cold(total, largest, num_gpus_per_node=gpus, num_nodes=nodes)
    theirs = printed(capsys.readouterr().out)
    assert len(theirs) == 6
    assert printed(table(total, largest, nodes, gpus)) == theirs


def test_documented_figures_of_t0_3b() -> None:
    with TRUTH.open() as file:
        rows = [row for row in csv.DictReader(file) if row["notes"].startswith("E")]
    assert len(rows) == 10
    for row in rows:
        options = dict(part.strip().split("=") for part in row["strategy"].split(" ", 2)[2].split(","))
        found = next(n for n in needs(*T0_3B, 1, int(row["gpus"])) if matches(n, options))
        host = float(re.search(r"per CPU\(node\) ([\d.]+)", row["notes"]).group(1))  # type: ignore[union-attr]
        assert (round(found.gpu / GIB, 2), round(found.host / GIB, 2)) == (float(row["measured_gib"]), host)


def matches(row: Needs, options: dict[str, str]) -> bool:
    wanted = (options["offload_param"] == "cpu", options["offload_optimizer"] == "cpu", options["zero_init"] == "1")
    return (row.offload_param, row.offload_optimizer, row.zero_init) == wanted
