"""The table of objectives decides which examples a run may learn from."""

from typing import Any, get_args

import pytest

from shardmake.config import objectives
from shardmake.config.formats import DataFormat
from shardmake.config.models import Dpo, Kto, Objective, Reward
from shardmake.config.objectives import OBJECTIVES, ObjectiveSpec
from shardmake.core.errors import ConfigError
from tests.unit.config.samples import make_run


def test_supervised_fine_tuning_is_the_default_and_reads_every_format_but_pairs() -> None:
    assert make_run().objective == "sft"
    assert set(OBJECTIVES["sft"].data_formats) == set(get_args(DataFormat)) - {"preference", "unpaired-preference"}


def test_settings_of_dpo_have_the_defaults_of_trl() -> None:
    from trl import DPOConfig

    fields = DPOConfig.__dataclass_fields__
    settings = make_run(objective="dpo").objective_settings
    assert isinstance(settings, Dpo) and make_run().objective_settings is None
    assert (settings.beta, settings.loss_type) == (fields["beta"].default, fields["loss_type"].default_factory())
    assert (settings.reference == "precomputed") == fields["precompute_ref_log_probs"].default


def test_settings_of_kto_have_the_defaults_of_trl() -> None:
    from trl import KTOConfig

    settings = make_run(objective="kto").objective_settings
    assert isinstance(settings, Kto)
    fields, own = KTOConfig.__dataclass_fields__, settings.model_dump()
    assert (own.pop("reference") == "precomputed") == fields["precompute_ref_log_probs"].default
    assert own == {name: fields[name].default for name in own}


@pytest.mark.parametrize(
    ("objective", "changes", "message"),
    [
        ("kto", {"objective": "sft", "kto": {"beta": 0.2}}, "kto has no effect with objective: sft"),
        ("kto", {"packing": True}, "packing: true cannot be combined"),
        ("kto", {"micro_batch_size": 1}, "micro_batch_size: 1 cannot be combined with objective: kto, which compares"),
        ("kto", {"method": "lora", "lora": {"targets": ["lm_head"]}}, "an adapter of lm_head has no effect"),
        (
            "kto",
            {"data": {"train": "org/data", "format": "preference"}},
            r"cannot learn from data\.format 'preference'\. Use unpaired-preference",
        ),
        ("dpo", {"objective": "sft", "dpo": {"beta": 0.2}}, "dpo has no effect with objective: sft"),
        ("dpo", {"packing": True}, "packing: true cannot be combined"),
        ("dpo", {"script": "train.py"}, "script cannot be combined"),
        ("dpo", {"loss": "fused"}, "loss: fused cannot be combined"),
        ("dpo", {"loss": "chunked"}, "loss: chunked cannot be combined"),
        ("dpo", {"torch_compile": True}, "torch_compile is not supported"),
        ("dpo", {"sequence_parallel": 2}, "sequence_parallel is not supported"),
        ("dpo", {"tensor_parallel": 2}, "tensor_parallel is not supported"),
        ("dpo", {"method": "lora", "lora": {"dropout": 0.1}}, r"lora\.dropout has no effect"),
        ("dpo", {"method": "lora", "lora": {"targets": ["lm_head"]}}, "an adapter of lm_head has no effect"),
        ("dpo", {"data": {"train": "org/data", "loss_on": "all"}}, r"data\.loss_on: all has no effect"),
        (
            "dpo",
            {"data": {"train": "org/data", "format": "chat"}},
            r"cannot learn from data\.format 'chat'\. Use preference",
        ),
        ("dpo", {"dpo": {"loss_type": ["aot"]}}, "'aot' is not allowed"),
        ("dpo", {"dpo": {"loss_type": []}}, "loss_type"),
        ("reward", {"objective": "dpo", "reward": {}}, "reward has no effect with objective: dpo"),
        ("reward", {"dpo": {}}, "dpo has no effect with objective: reward"),
        ("reward", {"packing": True}, "packing: true cannot be combined with objective: reward"),
        ("reward", {"method": "lora", "lora": {"targets": ["lm_head"]}}, "a reward model does not have that layer"),
        ("reward", {"evaluation": {"prompts": ["Hi"]}}, r"evaluation\.prompts has no effect with objective: reward"),
        ("reward", {"evaluation": {"losses": True}}, r"evaluation\.losses has no effect with objective: reward"),
        ("reward", {"evaluation": {"lm_eval": ["piqa"]}}, r"evaluation\.lm_eval has no effect with objective: reward"),
        ("reward", {"reward": {"center_rewards_coefficient": 0}}, "center_rewards_coefficient"),
    ],
)
def test_what_an_objective_does_not_take_is_refused(
    objective: Objective, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_run(**{"objective": objective, **changes})


def test_every_epoch_of_kto_has_the_same_order() -> None:
    """The completions that a prompt is compared with are those of its micro batch."""
    assert make_run(objective="kto").keeps_order
    assert not make_run(objective="dpo").keeps_order
    assert make_run(data={"train": "org/data", "order": "length"}).keeps_order


def test_only_an_objective_with_a_reference_model_has_one() -> None:
    assert make_run().reference is None
    assert make_run(objective="reward").reference is None


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_an_objective_with_a_reference_model_may_run_it_once(objective: Objective) -> None:
    section = {objective: {"reference": "precomputed"}}
    assert make_run(objective=objective).reference == "model"
    assert make_run(objective=objective, **section).reference == "precomputed"


def test_settings_of_reward_have_the_defaults_of_trl() -> None:
    from trl import RewardConfig

    settings = make_run(objective="reward").objective_settings
    default = RewardConfig.__dataclass_fields__["center_rewards_coefficient"].default
    assert isinstance(settings, Reward) and settings.center_rewards_coefficient == default


def test_an_unknown_objective_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"runs\.chat\.objective: 'stf' is not allowed\. Did you mean 'sft'"):
        make_run(objective="stf")


def test_data_of_a_format_that_the_objective_does_not_read_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(objectives.OBJECTIVES, "sft", ObjectiveSpec("chat only", ("chat",)))
    with pytest.raises(ConfigError, match=r"objective 'sft' cannot learn from data\.format 'text'\. Use chat\."):
        make_run(data={"train": "org/data", "format": "text"})
