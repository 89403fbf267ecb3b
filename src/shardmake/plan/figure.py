"""The plan's figure: a stacked bar per candidate, terms as colours, the GPU's memory as a line. Plain SVG."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from shardmake.core.units import format_bytes, format_number
from shardmake.run.plan import CandidateEstimate, Choice, MemoryEstimates

PALETTE = (
    "#2563eb", "#ea580c", "#16a34a", "#9333ea", "#ca8a04", "#0891b2", "#db2777", "#65a30d", "#7c3aed", "#dc2626",
    "#0d9488", "#b45309", "#4f46e5", "#be185d", "#15803d", "#a16207", "#0369a1", "#6d28d9",
)  # fmt: skip
REST = "#d1d5db"
ROW, BAR = 22, 14
LEFT, WIDTH, RIGHT = 470, 520, 150
"""Room for the longest name (64 characters of up to 7.3 in bold), for the bars, and for the figures behind them."""
LEGEND_COLUMNS = 3
CAPACITY_DRAWN = 4
"""A GPU with more times the memory of the longest bar would make the bars too short to read."""


def draw(memory: MemoryEstimates, chosen: Choice | None) -> str:
    """Return the SVG of ``memory.json``: one bar for each strategy with and without checkpointing.

    The memory of a rank is a line, or a text if it is several times the longest bar.
    """
    rows = bars(memory.candidates, chosen)
    capacity = memory.gpu_memory
    colours = _colours(rows)
    longest = max(row.gpu.device for row in rows)
    has_line = capacity <= CAPACITY_DRAWN * longest
    unit = WIDTH / (1.05 * (max(capacity, min(longest, 2 * capacity)) if has_line else longest))
    bottom = 30 + ROW * len(rows)
    parts = [_bar(row, 30 + ROW * index, unit, colours, chosen) for index, row in enumerate(rows)]
    limit = f"{format_bytes(capacity)} per rank"
    legend = _legend({**colours, "allocator, context, NCCL": REST}, bottom + 34)
    height = bottom + 44 + 16 * -(-(len(colours) + 1) // LEGEND_COLUMNS)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" '
            'font-family="sans-serif" font-size="11">',
            f'<rect width="100%" height="{height}" fill="white"/>',
            *parts,
            _line(LEFT + capacity * unit, bottom, limit) if has_line else _text(LEFT, f"limit: {limit}", "start"),
            *legend,
            "</svg>\n",
        ]
    )


def bars(candidates: Sequence[CandidateEstimate], chosen: Choice | None) -> list[CandidateEstimate]:
    """One candidate for each strategy and recomputation: the chosen one, else the fastest that fits, else the least."""
    best: dict[tuple[str, bool], CandidateEstimate] = {}
    for candidate in sorted(candidates, key=lambda item: _rank(item, chosen)):
        choice = candidate.choice
        best.setdefault((choice.strategy, choice.gradient_checkpointing), candidate)
    return list(best.values())


def _rank(candidate: CandidateEstimate, chosen: Choice | None) -> tuple[bool, bool, float]:
    is_chosen = candidate.choice == chosen
    fits = candidate.fits
    return not is_chosen, not fits, candidate.step_seconds if fits else candidate.gpu.device


def _colours(rows: Sequence[CandidateEstimate]) -> dict[str, str]:
    terms = dict.fromkeys(term for row in rows for term in row.gpu.terms)
    return {term: PALETTE[index % len(PALETTE)] for index, term in enumerate(terms)}


def _bar(row: CandidateEstimate, top: int, unit: float, colours: Mapping[str, str], chosen: Choice | None) -> str:
    """Terms end to end, what the allocator and the driver add, the name before and the figures behind.

    A bar of more than twice the GPU's memory is cut off at the figure's edge.
    """
    gpu, left = row.gpu, float(LEFT)
    pieces = []
    rest = {"": gpu.device - gpu.allocated}
    for term, size in (*gpu.terms.items(), *rest.items()):
        width = min(size * unit, LEFT + WIDTH - left)
        title = escape(f"{term or 'allocator, context, NCCL'}: {format_bytes(size)}")
        pieces.append(
            f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colours.get(term, REST)}">'
            f"<title>{title}</title></rect>"
        )
        left += width
    weight = "bold" if row.choice == chosen else "normal"
    figures = format_bytes(gpu.device) + (f", {format_number(row.step_seconds)} s/step" if row.fits else "")
    colour = "black" if row.fits else "#9ca3af"
    return "\n".join(
        [
            f'<text x="{LEFT - 6}" y="{top + 11}" text-anchor="end" font-weight="{weight}" fill="{colour}">'
            f"{escape(row.name)}</text>",
            *pieces,
            f'<text x="{left + 5:.1f}" y="{top + 11}" font-weight="{weight}" fill="{colour}">{figures}</text>',
        ]
    )


def _line(x: float, bottom: int, text: str) -> str:
    return (
        f'<line x1="{x:.1f}" y1="20" x2="{x:.1f}" y2="{bottom}" stroke="black" stroke-dasharray="5 3"/>'
        f"{_text(x, text, 'middle')}"
    )


def _text(x: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="14" text-anchor="{anchor}">{text}</text>'


def _legend(colours: Mapping[str, str], top: int) -> list[str]:
    width = (LEFT + WIDTH + RIGHT) // LEGEND_COLUMNS
    lines = []
    for index, (term, colour) in enumerate(colours.items()):
        x, y = 20 + width * (index % LEGEND_COLUMNS), top + 16 * (index // LEGEND_COLUMNS)
        lines.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        lines.append(f'<text x="{x + 15}" y="{y}">{escape(term)}</text>')
    return lines
