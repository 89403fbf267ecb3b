"""The figures of a run's report and its model card, drawn by matplotlib: the same data gives the same bytes.

Each function returns a drawing; `as_svg` and `as_png` render it.
"""

import functools
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from shardmake.core.units import format_bytes, unit_of
from shardmake.report.history import TrainingHistory
from shardmake.run.evaluation import LengthScore, ModelScore

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

BLUE, ORANGE, GREY = "#2563eb", "#ea580c", "#6b7280"
_LIGHT_GREY = "#d1d5db"
_STYLE = {
    "axes.axisbelow": True, "axes.grid": True, "axes.spines.right": False, "axes.spines.top": False, "font.size": 9,
    "grid.color": "#e5e7eb", "legend.frameon": False, "svg.fonttype": "none",
}  # fmt: skip


_CAPACITY_DRAWN = 4
"""A GPU with more times the memory of the bars would make them too short to read."""

_LEGEND_COLUMNS = 2
_LEGEND_ROW_HEIGHT = 0.18
"""Inches."""
_LONGEST_NAME = 40
"""Characters of a run's name in the legend."""
_COLOURS = 10
"""Colours of matplotlib's cycle, after which the next line style distinguishes the runs."""
_LINE_STYLES = ("-", "--", ":", "-.")
_HEIGHT = 3.2
"""Inches."""
_BARS_HEIGHT = 1.7
"""Inches for two bars, the axis and its label."""

Drawing = Callable[["Figure"], None]
P = ParamSpec("P")


def _drawing(draw: 'Callable[Concatenate["Figure", P], None]') -> Callable[P, Drawing]:
    """Let ``draw`` return a function of the figure alone."""
    return functools.wraps(draw)(lambda *data, **named: lambda figure: draw(figure, *data, **named))


@dataclass(frozen=True)
class Memory:
    """Bytes on a GPU, or in the RAM of a node whose ranks run on CPUs."""

    terms: Mapping[str, int]
    """Of the estimate, by kind: on the GPU of the fullest rank, or of all ranks of a node and their processes."""
    predicted: int
    """By the estimate: the terms, and what the GPU's allocator caches."""
    outside: int
    """CUDA context and NCCL by the estimate, which the allocator does not count; 0 in RAM."""
    capacity: int
    measured: int | None
    """Peak of what the GPU's allocator held on rank 0, which alone logs it; None if it was not logged."""
    place: str = "GPU memory"

    @property
    def device(self) -> int:
        """Bytes used on the device by the estimate."""
        return self.predicted + self.outside


@_drawing
def loss(figure: "Figure", history: TrainingHistory) -> None:
    """Draw training loss, evaluation loss, and the ends of attempts."""
    axes = figure.subplots()
    if any(trained := history.series("loss")):
        _plot(axes, *trained, color=BLUE, label="training")
    if any(evaluated := history.series("eval_loss")):
        axes.plot(*evaluated, color=ORANGE, marker="o", markersize=3, label="evaluation")
    _mark_interruptions(axes, history)
    _label(axes, "loss (nats per token)")


@_drawing
def losses(figure: "Figure", histories: Mapping[str, TrainingHistory]) -> None:
    """Draw the losses of several runs, by name, over tokens: training as a line, evaluation as points."""
    from matplotlib.ticker import EngFormatter

    axes = figure.subplots()
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 400k and 2M, of which several fit side by side
    for index, (name, history) in enumerate(histories.items()):
        style = _LINE_STYLES[index // _COLOURS % len(_LINE_STYLES)]
        # Of a long name start and end, in which the runs of a sweep differ.
        label = name if len(name) <= _LONGEST_NAME else f"{name[:10]}…{name[11 - _LONGEST_NAME :]}"
        line = _plot(axes, *history.series("loss", "tokens"), label=label, linewidth=1, linestyle=style)
        evaluated = history.series("eval_loss", "tokens")
        axes.plot(*evaluated, color=line.get_color(), marker="o", markersize=3, linestyle="")
    axes.set_xlabel("tokens, padding included")
    axes.set_ylabel("loss (nats per token)")
    _legend_below(figure, axes, _HEIGHT)


@_drawing
def optimizer(figure: "Figure", history: TrainingHistory) -> None:
    """Draw learning rate, and gradient norm before clipping, as far as they were logged."""
    shown = {"learning_rate": ("learning rate", BLUE), "grad_norm": ("gradient norm", ORANGE)}
    logged = [key for key in shown if history.series(key)[0]]
    for key, axes in zip(logged, figure.subplots(len(logged), sharex=True, squeeze=False)[:, 0], strict=True):
        name, colour = shown[key]
        _plot(axes, *history.series(key), color=colour)
        axes.set_ylabel(name)
    _mark_interruptions(axes, history)
    _label(axes, name)


@_drawing
def speed(figure: "Figure", history: TrainingHistory, used: tuple[list[int], list[float]] | None) -> None:
    """Draw tokens per second over all ranks, and MFU on the right axis."""
    axes = figure.subplots()
    _plot(axes, *history.series("tokens_per_second"), color=BLUE, label="tokens/s")
    _mark_interruptions(axes, history)
    _label(axes, "tokens per second, all ranks")
    axes.set_ylim(bottom=0)
    if used:
        right = axes.twinx()
        _plot(right, used[0], [100 * share for share in used[1]], color=ORANGE, linewidth=0.8)
        right.set_ylabel("MFU (%)", color=ORANGE)
        right.set_ylim(bottom=0)
        right.grid(visible=False)


@_drawing
def memory(figure: "Figure", found: Memory) -> None:
    """Draw the stacked terms of the estimate next to the measured peak and the GPU's capacity.

    What the measured peak does not count is hatched at the end of the predicted bar. Terms too small to be seen are
    drawn as one. A capacity of several times the bars is stated above the right end of the axis.
    """
    axes = figure.subplots()
    unit_name, unit = unit_of(max(found.device, found.measured or 0))
    left = 0.0
    for name, size in _visible(found).items():
        axes.barh("predicted", size / unit, left=left, label=f"{name} {format_bytes(size)}")
        left += size / unit
    cached = found.predicted - sum(found.terms.values())
    if cached > 0:
        label = f"cached by the allocator {format_bytes(cached)}"
        axes.barh("predicted", cached / unit, left=left, color=_LIGHT_GREY, label=label)
    if found.outside:
        label = f"CUDA context and NCCL {format_bytes(found.outside)}"
        hatched: dict[str, Any] = {"color": "white", "edgecolor": GREY, "hatch": "///"}
        axes.barh("predicted", found.outside / unit, left=found.predicted / unit, label=label, **hatched)
    if found.measured is not None:
        label = f"measured on rank 0 {format_bytes(found.measured)}"
        axes.barh("measured", found.measured / unit, color=GREY, label=label)
    capacity = f"limit: {found.place} {format_bytes(found.capacity)}"
    if found.capacity > _CAPACITY_DRAWN * max(found.device, found.measured or 0):
        axes.set_xlim(right=1.25 * max(found.device, found.measured or 0) / unit)
        axes.text(1, 1.02, f"{capacity} \u2192", transform=axes.transAxes, ha="right", fontsize=8)
    else:
        axes.axvline(found.capacity / unit, color="black", linestyle="--", linewidth=1, label=capacity)
    axes.set_xlabel(unit_name)
    _legend_below(figure, axes, _BARS_HEIGHT)


def _legend_below(figure: "Figure", axes: "Axes", height: float) -> None:
    """Put the legend below the axes, and add its rows to the ``height`` of the rest, in inches.

    Two columns of this font hold the longest names of the estimate's terms with their sizes.
    """
    handles, labels = axes.get_legend_handles_labels()
    figure.set_figheight(height + _LEGEND_ROW_HEIGHT * -(-len(labels) // _LEGEND_COLUMNS))
    place: dict[str, Any] = {"ncols": _LEGEND_COLUMNS, "loc": "outside lower center", "fontsize": 8}
    figure.legend(handles, labels, handlelength=1.5, handletextpad=0.5, columnspacing=1, **place)


def _visible(found: Memory) -> dict[str, int]:
    """Return the terms, with those below a hundredth of the predicted memory as one."""
    shown = {name: size for name, size in found.terms.items() if size * 100 >= found.predicted}
    small = sum(found.terms.values()) - sum(shown.values())
    return shown | ({"other" if "other" not in shown else "small terms": small} if small else {})


@_drawing
def by_length(figure: "Figure", base: ModelScore, tuned: ModelScore) -> None:
    """Draw the loss of the base and the tuned model by the length of the example."""
    axes = figure.subplots()
    for offset, (name, colour, score) in enumerate((("base", GREY, base), ("tuned", BLUE, tuned))):
        buckets = score.by_length
        places = [index + 0.4 * offset for index in range(len(buckets))]
        axes.bar(places, [bucket.loss for bucket in buckets], width=0.38, color=colour, label=name)
    axes.set_xticks([index + 0.2 for index in range(len(buckets))], [length_name(bucket) for bucket in buckets])
    axes.set_xlabel("tokens in the example")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1))


def length_name(bucket: LengthScore) -> str:
    """Return the display name of a length bucket."""
    return "longer" if bucket.up_to is None else f"up to {bucket.up_to:,}"


def _plot(axes: "Axes", places: Sequence[int], values: Sequence[float], **style: Any) -> "Line2D":
    """Draw ``values`` as a line, and those without a finite neighbour, of which no line is drawn, as points."""
    (line,) = axes.plot(places, values, **style)
    finite = [False, *map(math.isfinite, values), False]
    isolated = (index for index in range(len(values)) if finite[index : index + 3] == [False, True, False])
    points = [(places[index], values[index]) for index in isolated]
    alone = list(zip(*points, strict=True)) or [(), ()]
    axes.plot(*alone, color=line.get_color(), marker="o", markersize=3, linestyle="")
    return line


def _mark_interruptions(axes: "Axes", history: TrainingHistory) -> None:
    for number, lost in enumerate(history.interruptions):
        label = None if number else "interrupted"
        axes.axvline(lost.after_step, color=GREY, linestyle=":", linewidth=1, label=label)


def _label(axes: "Axes", what: str) -> None:
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(what)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend()


def _figure(draw: Drawing) -> "Figure":
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, _HEIGHT), layout="constrained")
        draw(figure)
    return figure


def as_png(drawing: Drawing) -> bytes:
    """Render a PNG for the model card; the hub does not show SVG."""
    buffer = io.BytesIO()
    _figure(drawing).savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def as_svg(name: str, drawing: Drawing) -> str:
    """Render an SVG element; ids contain ``name``, because several figures share one page."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        _figure(drawing).savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    element = buffer.getvalue()
    element = element[element.index("<svg") :]
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", element)
