"""Steps with transformers' optimizers: what they show agrees with the table, and decides where others can train."""

import pytest
from transformers.training_args import OptimizerNames

from shardmake.config.optimizers import OPTIMIZERS, TRIED
from shardmake.memory.optimizer_trial import answer, optimizer_spec


def test_every_name_of_transformers_is_a_row_or_tried() -> None:
    rows = {name for spec in OPTIMIZERS.values() for name in (spec.optim, spec.fused, *spec.aliases)}
    assert {one.value for one in OptimizerNames} - rows == {*TRIED}


@pytest.mark.parametrize("name", [name for name, spec in OPTIMIZERS.items() if not (spec.package or spec.own_class)])
def test_the_table_agrees_with_steps(name: str) -> None:
    spec = OPTIMIZERS[name]
    found = answer({"optim": spec.optim})
    assert found["class_name"] == spec.class_name
    assert found["state_bytes"] == pytest.approx(4 * spec.moments + spec.state_bytes, abs=0.2)
    assert [bool(found[where]) for where in ("fails_flat", "fails_sharded")] == [
        bool(spec.fails_flat), bool(spec.fails_sharded)
    ]  # fmt: skip


def test_steps_decide_where_another_optimizer_trains() -> None:
    spec = optimizer_spec("rmsprop")
    assert (spec.class_name, spec.state_bytes) == ("RMSprop", 4.0)
    assert not (spec.fails or spec.fails_flat or spec.fails_sharded) and "lomo_optim" in optimizer_spec("lomo").fails
    early = answer({"optim": "adagrad"})  # it makes its states when it is created, of weights that an engine replaces
    assert "KeyError" in early["fails_flat"] and "KeyError" in early["fails_sharded"]
