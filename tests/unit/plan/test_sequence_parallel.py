"""Sequence parallelism at plan: what it refuses, the data ranks, and long sequences that fit with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.plan.candidates import choices
from shardmake.plan.choose import NothingFitsError, find_choice
from shardmake.plan.planner import Planner
from shardmake.plan.resolve import resolve
from shardmake.plan.stage import choose_run
from shardmake.plan.suggestions import levers
from tests.unit.plan.test_planner import EIGHT, SEVENTY, gpus, run_of
from tests.unit.plans import LLAMA, make_cluster, make_plan, make_run


@pytest.mark.parametrize("key", ["sequence_parallel", "tensor_parallel"])
def test_a_group_is_one_data_parallel_rank(key: str, tmp_path: Path) -> None:
    choice = make_plan("zero1", **{key: 2}).choice
    assert (choice.world_size, choice.data_parallel, choice.global_batch_size) == (4, 2, 8)
    assert choice.readers == "2 groups of 2 ranks"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    run = make_run(model=str(tmp_path), packing=False, **{key: 2})
    found = list(choices(resolve(run, make_cluster(processes_per_node=4))))
    assert {item.global_batch_size for item in found} == {16} and {item.data_parallel for item in found} == {2}
    able = {name for name, spec in STRATEGY_SPECS.items() if getattr(spec, key) and spec.cpu and spec.is_deepspeed}
    assert {item.strategy for item in found} == able >= {"zero1", "zero2"}


@pytest.mark.parametrize(("config", "tokens", "nodes"), [(EIGHT, 131072, 1), (SEVENTY, 32768, 4)], ids=["8B", "70B"])
def test_long_sequences_fit_with_it(tmp_path: Path, config: dict[str, Any], tokens: int, nodes: int) -> None:
    """8B at 131,072 tokens on 8 H100, and 70B at 32,768 on 32: the refusal without it names it, and it fits."""
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131072}))
    run = run_of(str(tmp_path), sequence_length=tokens, nodes=nodes)
    with pytest.raises(NothingFitsError) as caught:
        choose_run(run, gpus())
    [(setting, values)] = [lever for lever in levers(caught.value.settings) if lever[0] == "sequence_parallel"]
    planners = (Planner(resolve(run.model_copy(update={setting: size}), gpus())) for size in values)
    fitting = [size for size, planner in zip(values, planners, strict=True) if find_choice(planner)]
    assert fitting == ([4, 8] if config is EIGHT else [2, 4, 8])
