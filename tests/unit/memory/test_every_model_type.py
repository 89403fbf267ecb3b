"""Every model type of transformers is estimated or refused with a message, and none ends in another error.

The helpers run in this process, because starting two processes for each of some 600 types takes an hour.
"""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from shardmake.commands.estimate import EstimateRequest, estimate
from shardmake.core.errors import ShardmakeError
from shardmake.core.failures import explain
from shardmake.memory import cache, trace

pytestmark = pytest.mark.models
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_blocks")
KEPT = 2


@pytest.mark.parametrize("kind", CONFIG_MAPPING_NAMES)
def test_it_is_estimated_or_refused(kind: str, tracer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "run_helper", in_this_process)
    monkeypatch.setattr(trace, "run_helper", in_this_process)
    (tmp_path / "config.json").write_text(json.dumps(small_config(kind)))
    request = EstimateRequest(str(tmp_path), gpus_per_node=2, sequence_length=64, strategies=["zero2"])
    try:
        rows = estimate(request).rows
    except ShardmakeError as error:
        assert "." in str(error)
    else:
        assert all(row.memory.gpu.reserved > 0 for row in rows)


def in_this_process(module: str, request: Mapping[str, Any], _: str) -> Any:
    """Run a helper's code as its process does, with JSON in and out and its errors that a user can fix."""
    try:
        return json.loads(json.dumps(importlib.import_module(module).answer(json.loads(json.dumps(request)))))
    except Exception as error:
        raise explain(error, Path()) or error from None


def small_config(kind: str) -> Any:
    """Return the defaults of a config class with two layers; of a class without valid defaults, its type alone."""
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) or MODEL_MAPPING_NAMES.get(kind)
    names = [classes] if isinstance(classes, str) else list(classes or ())
    try:
        values = with_few_layers(json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False)))
    except Exception:  # a config class may raise anything
        values = {}
    return {**values, "model_type": kind, "architectures": names[:1]}


def with_few_layers(values: Any) -> Any:
    """Return ``values`` with few layers, and with as many entries in lists that have one for each layer."""
    if not isinstance(values, dict):
        return values
    counts = {values[name] for name in LAYERS if isinstance(values.get(name), int)}
    few = {name: min(value, KEPT) for name, value in values.items() if name in LAYERS and isinstance(value, int)}
    lists = {name: value[:KEPT] for name, value in values.items() if isinstance(value, list) and len(value) in counts}
    return {**{name: with_few_layers(value) for name, value in values.items()}, **lists, **few}
