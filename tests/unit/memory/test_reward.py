"""The step of a reward model: the simulation matches a recording of TRL's own code on small tensors.

The peak is in a layer's backward pass, where a recording has one gradient more: see `tests.unit.memory.test_decoder`.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.memory.decoder import micro_step
from shardmake.memory.families import as_classifier
from shardmake.memory.read_config import from_config
from shardmake.memory.scenario import Scenario
from shardmake.memory.trace import _request
from tests.unit.memory.test_decoder import SETTINGS, SIZES, agree, gradients, saved, scenario
from tests.unit.memory.test_preferences import SMALL, bare, plans_enough, record_second


def reward(config: dict[str, Any] | None = None, **more: Any) -> Scenario:
    model = as_classifier(from_config({**SIZES, **SMALL, **(config or {})}))
    return scenario(model=model, **{"sequence_length": 256, "micro_batch": 4, **more})


CASES: dict[str, Scenario] = {name: reward(**setting) for name, setting in SETTINGS.items()}
CASES["gemma"] = reward({"model_type": "gemma", "head_dim": 64})


@pytest.mark.parametrize("name", CASES)
def test_the_simulated_step_matches_the_recorded_one(name: str, tracer: Any) -> None:
    case = CASES[name]
    recorded, simulated = recorded_step(case, tracer), micro_step(case)
    agree(simulated, recorded, saves=5e-3, peaks=0.04)
    assert gradients(simulated) == gradients(recorded)


def recorded_step(case: Scenario, tracer: Any) -> list[Any]:
    """Return the events of TRL's loss and its backward pass."""
    import torch
    from trl import RewardTrainer

    request = {**_request(case), "layers": None}
    tracer.emulate_gpu_kernels()
    model = tracer.prepare(request)
    tracer.materialize(model, request)
    model.config.pad_token_id = 1
    trainer = bare(RewardTrainer, model, args=SimpleNamespace(center_rewards_coefficient=0.01))
    tokens = torch.zeros((case.micro_batch, case.sequence_length), dtype=torch.long)

    def compute_loss() -> Any:
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        return RewardTrainer.compute_loss(trainer, model, inputs)

    return record_second(tracer, request, model, compute_loss)


def test_a_reward_model_needs_less_than_a_language_model_of_its_base() -> None:
    """It has no logits over the vocabulary."""
    case = CASES["bf16"]
    language = replace(case, model=from_config({**SIZES, **SMALL}))
    assert saved(micro_step(case)) < saved(micro_step(language))


@pytest.mark.parametrize("strategy", [name for name, spec in STRATEGY_SPECS.items() if not spec.uses_nvme])
def test_every_strategy_has_an_estimate(strategy: Any) -> None:
    plans_enough(reward(strategy=strategy, ranks_per_node=4))
