"""The wording of messages and pages: tests state when a text appears, and ``wording.yaml`` of their folder holds it.

After a change that is meant: UPDATE_GOLDEN=1 pytest tests/unit/FOLDER. Remove the file before to drop texts of tests
that are gone.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Wording = Callable[[object], None]


class _Dumper(yaml.SafeDumper):
    """Write texts of several lines as they are read."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


@pytest.fixture
def wording(request: pytest.FixtureRequest, tmp_path: Path) -> Wording:
    """Compare a text with the one that the table has for this test and its row; FOLDER stands for the test's folder."""
    file = Path(request.path).with_name("wording.yaml")
    function, _, case = request.node.name.partition("[")
    row = case.removesuffix("]") or "text"

    def compare(text: object) -> None:
        found = str(text).replace(str(tmp_path), "FOLDER")
        table = yaml.load(file.read_text(), yaml.CSafeLoader) if file.exists() else {}
        if os.environ.get("UPDATE_GOLDEN"):
            table.setdefault(function, {})[row] = found
            file.write_text(yaml.dump(table, Dumper=_Dumper, width=1000, allow_unicode=True, sort_keys=True))
        assert found == table.get(function, {}).get(row), "see tests/unit/wording.py"

    return compare


def rows_of(table: dict[str, list[Any]]) -> list[Any]:
    """Return kind and number of each row of a ``refusals.yaml``, whose rows end with the message."""
    return [pytest.param(kind, number, id=str(row[0])[:60]) for kind in table for number, row in enumerate(table[kind])]


def expect_row(file: Path, table: dict[str, list[Any]], kind: str, number: int, found: str) -> None:
    """Compare ``found`` with the message of a row of the table in ``file``."""
    if os.environ.get("UPDATE_GOLDEN"):
        table[kind][number][-1] = found
        options: dict[str, Any] = {"default_flow_style": True, "width": 10_000, "allow_unicode": True}
        rows = {name: [f"- {yaml.safe_dump(row, sort_keys=False, **options)}" for row in table[name]] for name in table}
        file.write_text("".join(f"{name}:\n{''.join(lines)}" for name, lines in rows.items()))
    assert found == table[kind][number][-1]
