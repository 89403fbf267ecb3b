"""Claims of tests: what a test that passes shows about a strategy, a method, an objective and a model family.

The marker is ``proves(*shows, strategy=..., method=..., objective=..., family=...)``; `tools.evidence` describes the values
of ``shows``. A value is a name, several names, or a function of the test's parameters. A value that is not given is the
parameter of the same name, else the default.
"""

import functools
import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest

from shardmake.core.environment import checkout_commit
from tools.evidence import PROPERTY, SHOWS

DEFAULTS = {"method": "full", "objective": "sft", "family": "llama"}
"""The demo's run; a strategy has no default."""
AXES = ("strategy", *DEFAULTS)


def claims_of(item: pytest.Item) -> list[dict[str, str]]:
    """Return the claims of a test."""
    callspec = getattr(item, "callspec", None)
    params: Mapping[str, Any] = callspec.params if callspec else {}
    return [claim for marker in item.iter_markers("proves") for claim in _expand(marker, params, item.nodeid)]


def _expand(marker: pytest.Mark, params: Mapping[str, Any], node: str) -> list[dict[str, str]]:
    """Return one claim for each combination of the marker's values."""
    unknown = ({*marker.args} - {*SHOWS}) | (marker.kwargs.keys() - {*AXES})
    if unknown or not marker.args:
        raise pytest.UsageError(f"The marker `proves` of {node} is not valid: {sorted(unknown) or 'it shows nothing'}.")
    values = [_values(axis, marker.kwargs, params) for axis in AXES]
    combinations = itertools.product(marker.args, *values)
    return [dict(zip(("shows", *AXES), names, strict=True)) for names in combinations]


def _values(axis: str, given: Mapping[str, Any], params: Mapping[str, Any]) -> list[str]:
    value = given.get(axis, params.get(axis, DEFAULTS.get(axis)))
    value = value(params) if callable(value) else value
    return [value] if isinstance(value, str) else list(value)


def attach(item: pytest.Item) -> None:
    """Let the JUnit report of a test hold its claims and the commit."""
    if claims := claims_of(item):
        found = {"node": item.nodeid, "commit": _commit(), "claims": claims}
        item.user_properties.append((PROPERTY, json.dumps(found)))


@functools.cache
def _commit() -> str:
    return checkout_commit() or "unknown"
