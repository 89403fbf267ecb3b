"""The page of file formats is that of the records, and every record of a run is in the schema."""

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


def test_every_record_is_in_the_schema() -> None:
    for module in pkgutil.iter_modules(shardmake.run.__path__):
        importlib.import_module(f"shardmake.run.{module.name}")
    records = [kind for kind in RunRecord.__subclasses__() if kind.__module__.startswith("shardmake.run")]
    fields = [set(part.get("properties", ())) for part in json.loads(schema())["$defs"].values()]
    written = {
        kind.__name__: {key for key, field in kind.model_fields.items() if not field.exclude} for kind in records
    }
    missing = [name for name, keys in written.items() if not any(keys <= found for found in fields)]
    assert missing == []
