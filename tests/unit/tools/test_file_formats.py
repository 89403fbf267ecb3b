"""The page of file formats is that of the records, and every record of a run is on it."""

import importlib
import pkgutil

import shardmake.run
from shardmake.run.record import RunRecord
from tools.file_formats import PAGE, page


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: make docs"


def test_every_record_is_on_the_page() -> None:
    for module in pkgutil.iter_modules(shardmake.run.__path__):
        importlib.import_module(f"shardmake.run.{module.name}")
    records = [kind for kind in RunRecord.__subclasses__() if kind.__module__.startswith("shardmake.run")]
    text = page()
    parts = {line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")}
    missing = [kind.__name__ for kind in records if kind.__name__ not in parts and not described(kind, text)]
    assert missing == []


def described(kind: type[RunRecord], text: str) -> bool:
    """Return whether a section has all fields of the record."""
    sections = text.split("\n## ")
    return any(all(f"| `{name}` |" in section for name in kind.model_fields) for section in sections)
