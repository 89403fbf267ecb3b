"""Plan without helper processes."""

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pytest

from shardmake.memory import cache


def plan_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer the plan's questions about a model here: a process for each imports torch, which takes longer."""

    def run_helper(module: str, request: Mapping[str, Any], doing: str) -> Any:
        return json.loads(json.dumps(import_module(module).answer(json.loads(json.dumps(request)))))

    monkeypatch.setattr(cache, "run_helper", run_helper)
