"""The table of objectives decides which examples a run may learn from."""

from typing import get_args

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


@pytest.mark.parametrize(("objective", "kind", "theirs"), [
    ("dpo", Dpo, "DPOConfig"), ("kto", Kto, "KTOConfig"), ("reward", Reward, "RewardConfig"),
])  # fmt: skip
def test_settings_have_the_defaults_of_trl(objective: Objective, kind: type, theirs: str) -> None:
    import trl

    settings, fields = make_run(objective=objective).objective_settings, getattr(trl, theirs).__dataclass_fields__
    assert isinstance(settings, kind) and make_run().objective_settings is None
    own = settings.model_dump()
    if "reference" in own:
        assert (own.pop("reference") == "precomputed") == fields["precompute_ref_log_probs"].default
    listed = {name: fields[name].default_factory() for name in own if isinstance(own[name], list)}
    assert own == {name: fields[name].default for name in own} | listed


def test_every_epoch_of_kto_has_the_same_order() -> None:
    """The completions that a prompt is compared with are those of its micro batch."""
    assert make_run(objective="kto").keeps_order and not make_run(objective="dpo").keeps_order
    assert make_run(data={"train": "org/data", "order": "length"}).keeps_order


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_with_a_reference_model_may_run_it_once(objective: Objective) -> None:
    has_one = objective in ("dpo", "kto")
    assert make_run(objective=objective).reference == ("model" if has_one else None)
    if has_one:
        assert make_run(objective=objective, **{objective: {"reference": "precomputed"}}).reference == "precomputed"


def test_data_of_a_format_that_the_objective_does_not_read_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(objectives.OBJECTIVES, "sft", ObjectiveSpec("chat only", ("chat",)))
    with pytest.raises(ConfigError, match=r"objective 'sft' cannot learn from data\.format 'text'\. Use chat\."):
        make_run(data={"train": "org/data", "format": "text"})
