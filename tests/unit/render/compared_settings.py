"""Compare many settings in one process of the libraries, which takes seconds to start."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from shardmake.core.environment import kernel_caches
from shardmake.core.library_process import run_module
from shardmake.core.temporary import temporary_folder
from shardmake.render.comparison import Comparison, Settings

_COMPARISONS = TypeAdapter(list[Comparison])


def compare_settings(settings: Sequence[Settings]) -> list[Comparison]:
    request = json.loads(json.dumps([asdict(one) for one in settings], default=str))
    path = {"PYTHONPATH": str(Path(__file__).parents[3])}
    environment = {**os.environ, **kernel_caches("/tmp"), **path, "CUDA_VISIBLE_DEVICES": ""}
    return _COMPARISONS.validate_python(run_module(__name__, request, environment))


def answer(request: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from shardmake.render.settings_table import compare

    answers = []
    for one in request:
        with temporary_folder("compare") as folder:
            answers.append(asdict(compare(Settings(**one), folder)[0]))
    return answers
