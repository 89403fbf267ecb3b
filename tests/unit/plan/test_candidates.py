"""The choices that a run and a cluster leave open."""

import json
from pathlib import Path

from shardmake.plan.candidates import choices
from shardmake.plan.resolve import resolve
from tests.unit.plans import LLAMA, make_cluster, make_run


def test_choices_keep_the_global_batch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    run = make_run(model=str(tmp_path), strategy="zero1", tensor_parallel=2)
    found = list(choices(resolve(run, make_cluster(processes_per_node=4))))
    assert found and {choice.global_batch_size for choice in found} == {16}
    assert {choice.data_parallel for choice in found} == {2}


def test_shared_matrices_leave_the_strategies_that_autotp_trains(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    run = make_run(model=str(tmp_path), tensor_parallel=2)
    assert {choice.strategy for choice in choices(resolve(run, make_cluster()))} == {"zero1", "zero2"}
