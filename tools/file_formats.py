"""Write the fields of a run's JSON files: ``python -m tools.file_formats``.

``docs/reference/file-formats.schema.json`` has all files; ``file-formats.md`` beside it those that people read.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from shardmake.checkpoint.record import CheckpointRecord
from shardmake.commands.listing import ListedRun
from shardmake.run.attempt import (
    Attempt,
    Hang,
    NodeExit,
    NodeHeartbeats,
    NodeStates,
    RankError,
    RequestedStop,
    SubmittedJob,
)
from shardmake.run.attempt_history import AttemptRecord
from shardmake.run.driver_job import DriverState, EndedRun, Workflow
from shardmake.run.engine import Engine, LearningSettings
from shardmake.run.evaluation import EvaluationResult
from shardmake.run.findings import Finding
from shardmake.run.metrics import LossWindow, MetricsLine
from shardmake.run.plan import MemoryEstimates, Plan, RenderReceipt
from shardmake.run.receipts import DataReceipt, MergeReceipt, PushReceipt, TrainingReceipt, WeightsReceipt
from shardmake.run.settings import StageSettings
from shardmake.run.sources import Sources
from shardmake.run.state import RunState
from shardmake.run.training_settings import TrainingSettings

PAGE = Path("docs/reference/file-formats.md")
SCHEMA = PAGE.with_suffix(".schema.json")
RECORDS: Mapping[str, type] = {
    "sources.json": Sources, "fetched/weights.json": WeightsReceipt, "plan/plan.json": Plan,
    "plan/memory.json": MemoryEstimates, "plan/rendered.json": RenderReceipt, "plan/training.json": TrainingSettings,
    "data/receipt.json": DataReceipt, "settings/STAGE.json": StageSettings, "train/job.json": SubmittedJob,
    "train/metrics.jsonl, one line": MetricsLine, "train/attempts/index.json, one entry": AttemptRecord,
    "train/attempts/NNN/attempt.json": Attempt, "train/attempts/NNN/learning.json": LearningSettings,
    "train/attempts/NNN/trained.json": Engine, "train/attempts/NNN/stopped.json": RequestedStop,
    "train/attempts/NNN/node-I.json": NodeExit, "train/attempts/NNN/errors/rank-N.json": RankError,
    "train/attempts/NNN/heartbeat/node-I.json": NodeHeartbeats, "train/attempts/NNN/hang.json": Hang,
    "the ranks of a node at a hang": NodeStates, "train/checkpoints/checkpoint-N/loss_window.json": LossWindow,
    "train/checkpoints/checkpoint-N/shardmake.json": CheckpointRecord, "train/receipt.json": TrainingReceipt,
    "model/receipt.json": MergeReceipt, "evaluation.json": EvaluationResult, "push/receipt.json": PushReceipt,
    "../.driver/NNN/workflow.json": Workflow, "../.driver/NNN/state.json": DriverState,
    "../.driver/NNN/ended/RUN.json": EndedRun, "shardmake status --json, one entry": RunState,
    "shardmake list --json, one entry": ListedRun, "shardmake doctor --json, one finding": Finding,
}  # fmt: skip
READ = (
    "train/metrics.jsonl, one line", "train/checkpoints/checkpoint-N/shardmake.json", "train/receipt.json",
    "evaluation.json", "shardmake status --json, one entry", "shardmake list --json, one entry",
)  # fmt: skip
"""The files that people and their programs read."""
HEAD = """# File formats

These are the files of a run that people and their programs read, by path below `runs/NAME/`. The JSON Schema of all
files, such as the plan, and of the parts that this page names is [file-formats.schema.json](file-formats.schema.json);
its `files` names the definition of each file. A type with `?` may be null. Sizes are in bytes, times in Unix seconds.
Unknown fields are errors. A file has a `format`, 1, and a `checksum`, the digest of all other keys. Both are generated
by `make docs`.
"""
OF_ALL = ("format", "checksum")
"""Fields that the head of the page describes."""


def page() -> str:
    """Return the whole page."""
    found = definitions()
    parts = {file: found["$defs"][found["files"][file].rpartition("/")[2]] for file in READ}
    sections = (_section(f"## {file}", part) for file, part in parts.items())
    return "\n".join([HEAD, *itertools.chain.from_iterable(sections)]).rstrip() + "\n"


def schema() -> str:
    """Return the JSON Schema of all files as text."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(dialect | definitions(), indent=1, sort_keys=True) + "\n"


def definitions() -> dict[str, Any]:
    """Return ``$defs``, and the definition of each file by its path as ``files``."""
    references, found = models_json_schema([(model, "serialization") for model in RECORDS.values()])
    return {"files": {file: references[model, "serialization"]["$ref"] for file, model in RECORDS.items()}, **found}


def _section(title: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield from (title, "")
    first = str(schema.get("description", "")).split("\n\n")[0].replace("\n", " ").replace("``", "`")
    if first:
        yield from (re.sub(r"^`[^`]*`: ", "", first), "")
    for name, field in schema["properties"].items():
        if name in OF_ALL:
            continue
        meaning = str(field.get("description", "")).replace("\n", " ")
        yield f"- `{name}`: {_kind(field)}. {meaning}".rstrip()
    yield ""


def _kind(schema: Mapping[str, Any]) -> str:
    """Return the type of a JSON schema in words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_kind(part) for part in schema[key]).replace(" or null", "?")
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_kind(schema['additionalProperties'])} by name"
    return str(schema.get("type", "any value"))


if __name__ == "__main__":
    PAGE.write_text(page())
    SCHEMA.write_text(schema())
