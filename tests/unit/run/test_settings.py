"""Recorded settings: what changed, what is refused, what reruns, and which define the result of a training."""

import os
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.effects import values_of
from shardmake.config.models import Cluster, Run
from shardmake.config.optimizers import OPTIMIZERS
from shardmake.core.atomic import write_json
from shardmake.core.errors import ConfigError
from shardmake.run.paths import RunDir
from shardmake.run.settings import (
    changed_results,
    changed_settings,
    compared_keys,
    current,
    is_trained,
    read_settings,
    recorded_settings,
    rerun_settings,
    rerun_text,
    stage_times,
)
from shardmake.run.settings_digest import result_settings, settings_digest
from shardmake.run.training_settings import OptimizerSettings
from tests.unit.plans import make_cluster, make_plan, make_run, make_training_settings

CLUSTER = make_cluster()
MORE_MEMORY = make_cluster(memory_gib_per_node=64.0)


@pytest.fixture
def rundir(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> RunDir:
    caplog.set_level("INFO", "shardmake")
    return RunDir(tmp_path / "runs/demo")


def finish(rundir: RunDir, *stages: str, cluster: Cluster = CLUSTER, **changes: Any) -> None:
    for stage in stages:
        with recorded_settings(stage, make_run(**changes), cluster, rundir):
            pass
        if stage == "train":
            rundir.train.mkdir(exist_ok=True)
            rundir.train_receipt.touch()


def test_a_stage_logs_changes_and_records_after_its_success(rundir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    finish(rundir, "plan")
    assert caplog.messages == []
    with pytest.raises(RuntimeError), recorded_settings("plan", make_run(learning_rate=5e-4), CLUSTER, rundir):
        raise RuntimeError
    changed = "Settings changed since the last plan of demo: learning_rate: 0.001 -> 0.0005."
    assert caplog.messages == [changed]
    finish(rundir, "plan", "plan", learning_rate=5e-4)
    assert caplog.messages == [changed, changed]
    assert [*stage_times(rundir)] == ["plan"] and stage_times(rundir)["plan"] > 0


def test_a_training_with_files_of_other_settings_is_refused(rundir: RunDir) -> None:
    finish(rundir, "fetch", "plan", "render", "data", "train")
    words = r"(?s)the plan stage.*learning_rate: 0.001 -> 0.0005.*shardmake plan demo"
    with pytest.raises(ConfigError, match=words):
        finish(rundir, "train", learning_rate=5e-4)
    finish(rundir, "plan", learning_rate=5e-4)
    with pytest.raises(ConfigError, match=r"Run the stage again: shardmake render demo"):
        finish(rundir, "train", learning_rate=5e-4)
    finish(rundir, "render", "train", learning_rate=5e-4)
    finish(rundir, "train", learning_rate=5e-4, checkpoints={"keep": 3})


@pytest.mark.parametrize("changes", [
    {"strategy": "fsdp"}, {"nodes": 2}, {"checkpoints": {"keep": 3}},
], ids=lambda changes: next(iter(changes)))  # fmt: skip
def test_an_unfinished_training_needs_files_of_all_settings(rundir: RunDir, changes: dict[str, Any]) -> None:
    """Also settings that cannot change the result: an old plan would train with another strategy than asked for."""
    finish(rundir, "fetch", "plan", "render", "data")
    for stage in ("plan", "render"):
        with pytest.raises(ConfigError, match=rf"the {stage} stage.*{next(iter(changes))}.*shardmake {stage} demo"):
            finish(rundir, "train", **changes)
        finish(rundir, stage, **changes)
    finish(rundir, "train", **changes, push={"to": "file:published/elsewhere"})


def test_a_later_stage_warns_that_it_uses_old_results(rundir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    finish(rundir, "train", "consolidate")
    finish(rundir, "push", seed=7)
    warning = "push uses old results: the train stage of demo ran with other settings: seed: 42 -> 7"
    assert caplog.messages[-1].startswith(warning)


def rerun(stage: str, run: Run, cluster: Cluster, rundir: RunDir, recorded: dict[str, str]) -> list[str]:
    """Return the keys whose parameters Snakemake would find changed."""
    now = rerun_settings(stage, values_of(run, cluster), rundir, recorded)
    assert set(now) == set(compared_keys(stage))
    return [key for key, value in now.items() if recorded.get(key) != value]


def test_settings_that_cannot_change_the_result_count_until_the_training_has_finished(rundir: RunDir) -> None:
    recorded = current("plan", make_run(), CLUSTER).values
    assert rerun("plan", make_run(), MORE_MEMORY, rundir, recorded) == ["cluster.memory_gib_per_node"]
    finish(rundir, "train")
    assert is_trained(values_of(make_run(), MORE_MEMORY), rundir)
    assert rerun("plan", make_run(), MORE_MEMORY, rundir, recorded) == []
    assert rerun("render", make_run(report_to=["wandb"]), MORE_MEMORY, rundir, recorded) == []
    both = rerun("plan", make_run(learning_rate=1.0), MORE_MEMORY, rundir, recorded)
    assert both == ["learning_rate", "cluster.memory_gib_per_node"], "the new training takes every setting as it is"


@pytest.mark.parametrize(("before", "now", "is_same"), [
    ({"data": {"train": "./data//a.jsonl"}}, {"data": {"train": "data/a.jsonl"}}, True),
    ({"data": {"train": [{"source": "b/../a.jsonl"}]}}, {"data": {"train": [{"source": "a.jsonl"}]}}, True),
    ({"script": "./t.py"}, {"script": "t.py"}, True),
    ({"model": "./org/name"}, {"model": "org/name"}, False),  # the second one is a model of the hub
    ({"data": {"train": "a.jsonl"}}, {"data": {"train": "/a.jsonl"}}, False),
    ({"data": {"train": "a.jsonl", "columns": {"text": "./a"}}}, {"data": {"train": "a.jsonl", "columns": {"text": "a"}}}, False),
])  # fmt: skip
def test_a_path_that_is_spelled_otherwise_reruns_nothing(
    rundir: RunDir, before: dict[str, Any], now: dict[str, Any], is_same: bool
) -> None:
    stage = "train" if "script" in before else "data" if "data" in before else "fetch"
    recorded = rerun_text(stage, values_of(make_run(**before), CLUSTER), rundir, None)
    values = values_of(make_run(**now), CLUSTER)
    assert (rerun_text(stage, values, rundir, recorded) == recorded) is is_same
    finish(rundir, stage, **before)
    assert (changed_settings(stage, values, rundir) == []) is is_same


def test_a_model_whose_weights_were_removed_or_replaced_is_merged_again_once(rundir: RunDir) -> None:
    """The parameter of the rule changes at each loss, and not by the merge that follows."""
    run, weights = make_run(), rundir.model / "model.safetensors"
    values, recorded = values_of(run, CLUSTER), None

    def merge(at: int) -> str:
        """Merge as the rule does, whose parameter Snakemake takes before the job."""
        now = rerun_text("consolidate", values, rundir, recorded)
        weights.parent.mkdir(parents=True, exist_ok=True)
        weights.write_text("weights")
        write_json(rundir.model_receipt, {"verification": {"files": {weights.name: {"size": 7}}}})
        os.utime(rundir.model_receipt, (at, at))
        finish(rundir, "consolidate")
        return now

    recorded = merge(0)
    for at, lose in enumerate((weights.unlink, lambda: weights.write_text("other weights"), weights.unlink), 1):
        assert rerun_text("consolidate", values, rundir, recorded) == recorded
        assert changed_settings("consolidate", values, rundir) == []
        lose()
        assert changed_settings("consolidate", values, rundir) == [f"{weights}: removed or replaced"]
        now = merge(at)
        assert now != recorded
        recorded = now


def test_a_receipt_of_other_settings_is_not_a_finished_training(rundir: RunDir) -> None:
    """The plan of the new training was made, its training has not run, and the old receipt is still there."""
    finish(rundir, "train")
    recorded = current("plan", make_run(learning_rate=1.0), CLUSTER).values
    assert not is_trained(values_of(make_run(learning_rate=1.0), CLUSTER), rundir)
    assert rerun("plan", make_run(learning_rate=1.0), MORE_MEMORY, rundir, recorded) == ["cluster.memory_gib_per_node"]
    rundir.train_receipt.unlink()
    assert not is_trained(values_of(make_run(), CLUSTER), rundir)


def test_no_secret_is_stored(rundir: RunDir) -> None:
    def run(password: str) -> Run:
        words = ["--hub_token", password]
        return make_run(push={"to": f"s3://ada:{password}@bucket/x"}, script="train.py", script_args=words)

    with recorded_settings("plan", run("hunter2hunter2"), CLUSTER, rundir):
        pass
    assert "hunter2" not in rundir.stage_settings("plan").read_text()
    changed = changed_results("plan", values_of(run("another"), CLUSTER), rundir)
    assert [line.split(":")[0] for line in changed] == ["script_args"]
    assert changed_results("plan", values_of(run("hunter2hunter2"), CLUSTER), rundir) == []
    found = read_settings("plan", rundir)
    assert found and found.values["push.to"].startswith("s3://[removed]@bucket/x #")


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
def test_the_micro_batch_counts_if_the_loss_compares_examples(objective: str, differs: set[tuple[str, str]]) -> None:
    settings = PLAIN.model_copy(update={"objective": objective})
    before, after = (result_settings(settings, plan, "data") for plan in (SMALL, LARGE))
    assert after.items() - before.items() == differs
