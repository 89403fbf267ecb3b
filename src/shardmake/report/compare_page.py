"""``compare.html``: the comparison of several runs on one page without further files."""

from pathlib import Path
from typing import Final

from shardmake.core.atomic import write_text
from shardmake.core.secrets import redact
from shardmake.report import figures
from shardmake.report.comparison import Comparison

TEMPLATE: Final = Path(__file__).with_name("compare.html.jinja")


def write_comparison(comparison: Comparison, title: str, page: Path) -> None:
    """Write ``page`` with the table of the comparison, and the losses over tokens of the runs that logged both."""
    from jinja2 import Environment, StrictUndefined

    histories = {run.name: run.history for run in comparison.runs}
    drawn = {name: history for name, history in histories.items() if history.by_tokens("loss")[0]}
    header, rows = comparison.table()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(TEMPLATE.read_text()).render(
        title=title,
        settings=list(comparison.settings),
        header=header,
        rows=rows,
        losses=figures.as_svg("losses", figures.losses(drawn)) if drawn else "",
        missing=[name for name in histories if name not in drawn],
        notes=comparison.notes,
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, redact(text))
