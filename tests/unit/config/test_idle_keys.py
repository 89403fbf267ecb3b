"""Every key of a section changes what the run does, or it is refused."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.effects import effect_of
from shardmake.config.methods import METHODS
from shardmake.config.models import Run, Section
from shardmake.config.objectives import OBJECTIVES
from shardmake.core.errors import ConfigError
from shardmake.render.stage import render_files
from tests.unit.config.samples import make_run
from tests.unit.plans import make_cluster, make_model, make_plan

OTHER: dict[str, dict[str, Any]] = {
    "lora": {"rank": 3, "alpha": 5, "dropout": 0.3, "targets": ["q_proj"]},
    "dpo": {"beta": 0.7, "reference": "precomputed", "loss_type": ["ipo"]},
    "kto": {"beta": 0.7, "reference": "precomputed", "desirable_weight": 2.0, "undesirable_weight": 3.0},
    "reward": {"center_rewards_coefficient": 0.5},
    "checkpoints": {
        "every_steps": 7,
        "keep": 9,
        "keep_best": True,
        "keep_every_steps": 11,
        "asynchronous": True,
        "early_stopping": 2,
    },
}
"""Another value than the default for each key of the sections that training reads."""


def rendered(run: Run) -> str:
    plan = make_plan("zero2")
    plan = plan.model_copy(
        update={"workload": plan.workload.model_copy(update={"method": run.method, "objective": run.objective})}
    )
    files = render_files(plan, run, make_cluster(), make_model(), Path("runs/chat/train/attempts/001"))
    return json.dumps([files.accelerate, files.deepspeed, files.training.as_json()], default=str)


def test_the_table_has_every_key_of_its_sections() -> None:
    for section, values in OTHER.items():
        (kind,) = (
            one
            for one in (Run.model_fields[section].annotation, *getattr(Run.model_fields[section].annotation, "__args__", ()))
            if isinstance(one, type) and issubclass(one, Section)
        )  # fmt: skip
        assert set(values) == set(kind.model_fields), f"add the new key of {section} with another value"
        assert all(
            "render" in {*effect_of(f"{section}.{key}").changes, *effect_of(f"{section}.{key}").reads} for key in values
        )


@pytest.mark.parametrize(("objective", "method"), product(OBJECTIVES, METHODS))
def test_each_value_is_rendered_or_refused(objective: str, method: str) -> None:
    base = {"objective": objective, "method": method, "eval_every_steps": 5}
    before, used, refused = rendered(make_run(**base)), set(), set()
    for section, values in OTHER.items():
        for key, value in values.items():
            try:
                run = make_run(**base, **{section: {key: value}})
            except ConfigError as error:
                assert "no effect" in str(error) or "cannot be combined" in str(error), error
                refused.add(f"{section}.{key}")
            else:
                used.add(section)
                assert rendered(run) != before, f"{section}.{key} has no effect with {objective} and {method}"
    sections = {"checkpoints", *(["lora"] if METHODS[method].has_adapters else []), *({objective} & OTHER.keys())}
    assert used == sections
    assert {key.partition(".")[0] for key in refused} - {"lora"} == OTHER.keys() - sections - {"lora"}


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": {"rank": 16}, "method": "full"},
        {"lora": None},
        {"lora": {"rank": 8}, "method": "qlora"},
        {"scheduler": "constant", "warmup_ratio": 0},
        {"scheduler": "constant"},
        {"freeze": ["model.embed_tokens", "!*.norm"]},
        {"final_checkpoint": "best", "checkpoints": {"keep_best": True, "early_stopping": 3}},
        {"evaluation": {"lm_eval": ["piqa"], "lm_eval_limit": 5}},
        {"push": {"to": ["file:a", "hub:a/b"], "revision": "x", "pull_request": True}},
        {"script": "t.py", "script_args": ["--lr=$SHARDMAKE_LEARNING_RATE", "${SHARDMAKE_OUTPUT}/x", "$HOME", "$$SHARDMAKE_X", "5$"]},
    ],
)  # fmt: skip
def test_keys_with_an_effect_are_accepted(changes: dict[str, Any]) -> None:
    """Those without one are rows of test_refusals."""
    make_run(**changes)
