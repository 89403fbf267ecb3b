"""The page of file formats is that of the records, and every record of a run is on it."""

import importlib
import json
import pkgutil

import jsonschema
import pytest

import shardmake.run
from shardmake.run.record import RunRecord
from tests.unit.plans import make_plan
from tools.file_formats import PAGE, SCHEMA, page, schema


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: make docs"
    assert SCHEMA.read_text() == schema(), "run: make docs"


def test_the_schema_accepts_a_file_and_refuses_an_unknown_field() -> None:
    found = json.loads(schema())
    wanted = {"$defs": found["$defs"], "$ref": found["files"]["plan/plan.json"]}
    plan = json.loads(json.dumps(make_plan("zero2").as_json()))
    jsonschema.validate(plan, wanted)
    with pytest.raises(jsonschema.ValidationError, match="surprise"):
        jsonschema.validate(plan | {"surprise": 1}, wanted)


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
    written = [name for name, field in kind.model_fields.items() if not field.exclude]
    return any(all(f"| `{name}` |" in section for name in written) for section in sections)
