import re
from pathlib import Path

import pytest

from shardmake.core.units import GIB
from shardmake.report import figures
from shardmake.report.figures import Memory
from shardmake.report.history import read_history
from tests.finished_run import make_rundir

TERMS = {"weights": 6 * GIB, "gradients": 2 * GIB, "layer inputs": GIB // 50, "logits": GIB // 40}


def texts(drawing: figures.Drawing) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", figures.as_svg("figure", drawing))


def labels(memory: Memory) -> list[str]:
    return texts(figures.memory(memory))


def test_every_part_of_the_memory_is_named_with_its_size() -> None:
    found = labels(Memory(TERMS, 9 * GIB, 16 * GIB, 10 * GIB))
    for label in (
        "weights 6.0 GiB",
        "gradients 2.0 GiB",
        "other 46 MiB",
        "allocator and context 978 MiB",
        "measured 10.0 GiB",
    ):
        assert label in found
    assert not any("layer inputs" in label for label in found), "terms too small to be seen are one"
    assert "memory of a rank 16.0 GiB" in found


@pytest.mark.parametrize(("capacity", "drawn"), [(80, False), (16, True)])
def test_a_capacity_far_above_the_bars_does_not_shrink_them(capacity: int, drawn: bool) -> None:
    found = labels(Memory(TERMS, 9 * GIB, capacity * GIB, None))
    ticks = [float(label) for label in found if re.fullmatch(r"[\d.]+", label)]
    assert (max(ticks) >= 16) is drawn and f"memory of a rank {capacity}.0 GiB" in found


def test_large_numbers_of_tokens_do_not_overlap_on_the_axis(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    rundir.metrics.write_text("".join(f'{{"step": {n}, "tokens": {n}00000, "loss": {9 / n}}}\n' for n in range(1, 5)))
    found = texts(figures.losses({"chat": read_history(rundir)}))
    assert "400k" in found and not any(re.fullmatch(r"\d{5,}", text) for text in found)
