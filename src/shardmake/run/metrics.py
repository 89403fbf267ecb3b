"""Reading ``metrics.jsonl``, which trainings and scripts of users append to, and which a kill may cut short."""

import json
from typing import Any


def parse_metrics(text: str) -> list[dict[str, Any]]:
    """The JSON objects with a ``step``, one a line; every other line is left out."""
    return [line for line in map(_parse, text.splitlines()) if isinstance(line, dict) and "step" in line]


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
