"""Runs that learn from preferences: what the plan refuses until it is supported."""

from dataclasses import replace
from typing import Any

import pytest

from shardmake.config.models import STRATEGIES
from shardmake.core.errors import ConfigError
from shardmake.memory.hardware import from_cluster
from shardmake.plan.resolve import _check_preferences, unsuitable
from tests.unit.plans import make_cluster, make_model, make_run

DPO: dict[str, Any] = {"objective": "dpo", "packing": False}


def test_strategies_that_train_on_preferences() -> None:
    run = make_run(**DPO)
    refused = [name for name in STRATEGIES if unsuitable(run, name)]
    assert refused == ["zero3-hpz", "zero3-nvme", "fsdp-hybrid"]
    assert unsuitable(run, "zero3-nvme") == "objective: dpo is not tested under zero3-nvme. Take another strategy."
    assert "Take fsdp_version: 2" in unsuitable(make_run(**DPO, fsdp_version=1), "fsdp")


def test_gpus_and_mixtures_of_experts_are_refused() -> None:
    run, model = make_run(**DPO), make_model()
    on_gpus, on_cpus = (from_cluster(make_cluster(accelerator=name)) for name in ("h100", "cpu"))
    with pytest.raises(ConfigError, match=r"not supported on GPUs yet.*accelerator: h100"):
        _check_preferences(run, on_gpus, model)
    with pytest.raises(ConfigError, match="a mixture of experts"):
        _check_preferences(run, on_cpus, replace(model, config=model.config | {"router_aux_loss_coef": 0.1}))
    _check_preferences(run, on_cpus, model)
    _check_preferences(make_run(), on_gpus, model)
