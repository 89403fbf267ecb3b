"""The wording of messages and pages: tests state when a text appears, and ``wording.yaml`` of their folder holds it.

After a change that is meant: UPDATE_GOLDEN=1 pytest tests/unit/FOLDER. Remove the file before to drop texts of tests
that are gone.
"""

import os
from collections.abc import Callable
from pathlib import Path

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
