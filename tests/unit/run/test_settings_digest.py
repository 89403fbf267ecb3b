"""The settings that define the result of a training."""

from pathlib import Path
from typing import Any

import pytest

from shardmake.config.optimizers import OPTIMIZERS
from shardmake.run.paths import RunDir
from shardmake.run.settings_digest import result_settings, settings_digest
from shardmake.run.training_settings import OptimizerSettings
from tests.unit.plans import make_plan, make_training_settings

PLAIN = make_training_settings()
SMALL, LARGE = make_plan("zero2"), make_plan("zero3", micro_batch_size=4, gradient_accumulation_steps=1)
OWN = {"communication_data_type": "fp32", "zero_optimization.reduce_bucket_size": 4096, "debug": True}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, str | None]]] = {
    "values of own files that can change the result": ({"own_files": OWN}, {"communication_data_type": "fp32"}),
    "another chat template": (
        {"model": PLAIN.model.model_copy(update={"chat_template": "{{ messages }}"})},
        {"content of the chat template": None},
    ),
    "other rates": ({"learning_rates": {"lm_head": 1e-5}}, {"learning_rates": '{"lm_head": 1e-05}'}),
    "Muon": (
        {"optimizer": OptimizerSettings(class_name=OPTIMIZERS["muon"].own_class, arguments={})},
        {"class of the optimizer": "shardmake.train.muon.MuonWithAdamW"},
    ),
    "frozen weights": ({"freeze": ["*.mlp"]}, {"freeze": '["*.mlp"]'}),
    # its last checkpoint would count as the end of a training with more patience, too
    "an early end": (
        {"checkpoints": PLAIN.checkpoints.model_copy(update={"early_stopping": 2})},
        {"checkpoints.early_stopping": "2"},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_training(name: str, tmp_path: Path) -> None:
    changes, expected = OTHERS[name]
    before, after = (result_settings(one, SMALL, "data") for one in (PLAIN, PLAIN.model_copy(update=changes)))
    found = dict(after.items() - before.items())
    assert found == {key: found[key] if value is None else value for key, value in expected.items()}
    assert settings_digest(before, RunDir(tmp_path)) != settings_digest(after, RunDir(tmp_path))


@pytest.mark.parametrize(("objective", "differs"), [("sft", set()), ("kto", {("micro batch", "4 on 4 ranks")})])
def test_another_micro_batch_is_another_training_only_if_the_loss_compares_its_examples(
    objective: str, differs: set[tuple[str, str]]
) -> None:
    settings = PLAIN.model_copy(update={"objective": objective})
    before, after = (result_settings(settings, plan, "data") for plan in (SMALL, LARGE))
    assert after.items() - before.items() == differs
