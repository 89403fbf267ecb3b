import json
import re

import pytest

from shardmake.commands.estimate_table import GPU_TERMS, HOST_TERMS
from shardmake.core.units import GIB
from shardmake.plan.stage import make_plan
from shardmake.report import figures
from shardmake.report.figures import Memory
from shardmake.report.history import read_history
from shardmake.run.paths import RunDir
from tests.unit.plan.test_planner import EIGHT, gpus, run_of

TERMS = {"weights": 6 * GIB, "gradients": 2 * GIB, "layer inputs": GIB // 50, "logits": GIB // 40}


def texts(drawing: figures.Drawing) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", figures.as_svg("figure", drawing))


def labels(memory: Memory) -> list[str]:
    return texts(figures.memory(memory))


def assert_whole(drawing: figures.Drawing) -> None:
    """Raise an `AssertionError` if the legend leaves the canvas, covers the axes, or leaves them little room."""
    figure = figures._figure(drawing)
    figure.draw_without_rendering()
    (legend,), (axes,) = figure.legends, figure.axes
    box, plotted, canvas = legend.get_window_extent(), axes.get_window_extent(), figure.bbox
    assert canvas.x0 <= box.x0 and box.x1 <= canvas.x1 and canvas.y0 <= box.y0, (box, canvas)
    assert box.y1 <= plotted.y0, "the legend covers the axes"
    assert plotted.width >= 0.8 * canvas.width and plotted.height >= 50, (plotted, canvas)


@pytest.fixture(scope="module")
def estimates(tmp_path_factory: pytest.TempPathFactory) -> list[Memory]:
    """The memory of a model of 8 billion parameters under every strategy, with and without checkpointing."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(EIGHT))
    _, found = make_plan("run", run_of(str(folder)), gpus(max_nodes=1))
    kinds = {(row.choice.strategy, row.choice.gradient_checkpointing): row.gpu for row in found.candidates}
    return [
        Memory(gpu.terms, gpu.reserved, gpu.device - gpu.reserved, found.gpu_memory, gpu.reserved)
        for gpu in kinds.values()
    ]


def test_the_legend_of_real_estimates_is_inside_the_figure(estimates: list[Memory]) -> None:
    assert len(estimates) > 10 and max(len(memory.terms) for memory in estimates) > 7
    for memory in estimates:
        assert_whole(figures.memory(memory))


@pytest.mark.parametrize("count", [2, 14, 40])
def test_long_names_and_many_runs_leave_the_losses_their_room(rundir: RunDir, count: int) -> None:
    history = read_history(rundir)
    names = [f"llama-3.1-8b-instruct-chat-lora-rank64-{'x' * 20}-lr{number}e-5" for number in range(count)]
    drawing = figures.losses(dict.fromkeys(names, history))
    assert_whole(drawing)
    figure = figures._figure(drawing)
    assert len({text.get_text() for text in figure.legends[0].get_texts()}) == count
    lines = [line for line in figure.axes[0].lines if line.get_linestyle() != "None"]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines) == count


@pytest.mark.parametrize("terms", [GPU_TERMS, HOST_TERMS])
def test_the_legend_of_all_terms_is_inside_the_figure(terms: dict[str, str]) -> None:
    sizes = dict.fromkeys(terms, 1234 * GIB)
    total = sum(sizes.values())
    assert_whole(figures.memory(Memory(sizes, total + 900 * GIB, 900 * GIB, 2 * total, total)))


def test_every_part_of_the_memory_is_named_with_its_size() -> None:
    found = labels(Memory(TERMS, 9 * GIB, 2 * GIB, 16 * GIB, 10 * GIB))
    for label in (
        "weights 6.0 GiB",
        "gradients 2.0 GiB",
        "other 46 MiB",
        "cached by the allocator 978 MiB",
        "CUDA context and NCCL 2.0 GiB",
        "measured on rank 0 10.0 GiB",
    ):
        assert label in found
    assert not any("layer inputs" in label for label in found), "terms too small to be seen are one"
    assert "limit: GPU memory 16.0 GiB" in found


@pytest.mark.parametrize(("capacity", "drawn"), [(80, False), (16, True)])
def test_a_capacity_far_above_the_bars_does_not_shrink_them(capacity: int, drawn: bool) -> None:
    found = labels(Memory(TERMS, 9 * GIB, GIB, capacity * GIB, None))
    ticks = [float(label) for label in found if re.fullmatch(r"[\d.]+", label)]
    assert (max(ticks) >= 16) is drawn and f"limit: GPU memory {capacity}.0 GiB{'' if drawn else ' →'}" in found


@pytest.mark.parametrize(("unit", "name"), [(1, "bytes"), (1 << 10, "KiB"), (1 << 20, "MiB"), (1 << 30, "GiB")])
def test_the_axis_has_the_unit_of_the_sizes(unit: int, name: str) -> None:
    found = labels(Memory({"weights": 60 * unit}, 64 * unit, 6 * unit, 80 << 40, 70 * unit))
    assert name in found and {"0", "20", "40", "60"} <= {label.removesuffix(".0") for label in found}


@pytest.mark.parametrize(("losses", "points"), [
    ("3", [1]), ("3, NaN, 2, NaN, 2, 1", [1, 3]), ("NaN, 3", [2]), ("3, 2", []), ("NaN, NaN", []),
])  # fmt: skip
def test_a_value_that_no_line_reaches_is_a_point(rundir: RunDir, losses: str, points: list[int]) -> None:
    lines = [f'{{"step": {n}, "attempt": 1, "tokens": {n}, "loss": {x}, "tokens_per_second": {x}, "grad_norm": {x}}}\n'
             for n, x in enumerate(losses.split(", "), 1)]  # fmt: skip
    rundir.metrics.write_text("".join(lines))
    history = read_history(rundir)
    for drawing in (
        figures.loss(history),
        figures.optimizer(history),
        figures.losses({"chat": history}),
        figures.speed(history, None),
    ):
        (axes,) = figures._figure(drawing).axes
        assert [x for line in axes.lines if line.get_marker() == "o" for x in line.get_xdata()] == points


def test_large_numbers_of_tokens_do_not_overlap_on_the_axis(rundir: RunDir) -> None:
    rundir.metrics.write_text("".join(f'{{"step": {n}, "tokens": {n}00000, "loss": {9 / n}}}\n' for n in range(1, 5)))
    found = texts(figures.losses({"chat": read_history(rundir)}))
    assert "400k" in found and not any(re.fullmatch(r"\d{5,}", text) for text in found)
