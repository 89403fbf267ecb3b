"""The page of options is that of the commands."""

import typer

from shardmake.cli import app
from tools.command_options import PAGE, page


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: make docs"


def test_every_command_has_a_section_with_its_options() -> None:
    group = typer.main.get_command(app)
    sections = dict(part.split("\n", 1) for part in page().split("\n## ")[1:])
    assert set(sections) == {"shardmake", *group.commands}  # type: ignore[attr-defined]
    assert "`--json`" in sections["estimate"]
    assert "`--as-json`" not in page(), "names are those on the command line"
