"""Tables in a terminal, in a pipe and in a file."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def plain_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with aligned columns, two spaces apart; a column without a value in any row is left out."""
    lines = _filled(headers, rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(text.rstrip() for text in texts)


def _filled(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return headers and rows without the columns that have no value in any row."""
    shown = [index for index in range(len(headers)) if any(row[index] for row in rows)]
    return [[row[index] for index in shown] for row in (headers, *rows)]


def rich_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> "Table":
    """Return the same table for a terminal, which wraps long cells."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    names, *lines = _filled(headers, rows)
    for index, name in enumerate(names):
        table.add_column(name, no_wrap=index == 0, overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: fitted to the terminal, or plain where the output is a pipe or a file."""
    if not sys.stdout.isatty():
        print(plain_table(headers, rows))
        return
    from rich.console import Console

    Console().print(rich_table(headers, rows))
