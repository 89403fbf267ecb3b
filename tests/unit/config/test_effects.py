"""The table of the keys and the stages whose results they can change."""

from collections import Counter
from pathlib import Path

import pytest

from shardmake.config.effects import EFFECTS, KEYS, STAGES, differences, effect_of, read_keys, result_keys, values_of
from tests.unit.plans import make_cluster, make_run


def test_every_key_of_the_configuration_has_a_row() -> None:
    """Fails for a new key: decide which stages read it, and whose results it can change."""
    assert all(effect_of(key) for key in KEYS)
    assert len(KEYS) > 90 and {"data.train", "lora.rank", "cluster.slurm.extra"} <= set(KEYS)


def test_every_row_names_keys_and_stages_that_exist_and_no_key_twice() -> None:
    named = [key for row in EFFECTS for key in row.keys]
    assert [key for key, count in Counter(named).items() if count > 1] == []
    sections = {f"{key.rstrip('.')}." for key in named}
    assert {one for one in sections if not any(f"{key}.".startswith(one) for key in KEYS)} == set()
    assert {stage for row in EFFECTS for stage in (*row.changes, *row.reads)} <= set(STAGES)
    (unread,) = (row.keys for row in EFFECTS if not (row.changes or row.reads))
    runs_stages = ("notify.", "cluster.login_memory_gib", "cluster.slurm.driver")
    outside = [key for key in unread if not key.startswith(runs_stages)]
    assert outside == [], "a key that nothing reads should not exist; no stage has to compare those of what runs stages"


@pytest.mark.parametrize("key", ["nonsense", "cluster.nonsense", "checkpoint.keep"])
def test_an_unknown_key_is_refused_with_the_place_of_the_table(key: str) -> None:
    with pytest.raises(KeyError, match=r"Add it to the row"):
        effect_of(key)


def test_stages_whose_result_an_edit_changes() -> None:
    changed = {
        "learning_rate": {"plan", "render", "train"}, "sequence_length": {"data", "plan", "render", "train"},
        "data.train": {"fetch", "data", "plan", "render", "train"}, "dtype": {"consolidate"},
        "data.format": {"data", "plan", "render", "train"}, "evaluation.prompts": {"evaluate"},
        "evaluation.batch_tokens": set(), "push.to": {"push"}, "report_to": set(), "checkpoints.keep": set(),
        "cluster.hang_seconds": set(), "cluster.memory_gib_per_node": set(), "cluster.trainings_per_user": set(),
    }  # fmt: skip
    assert {key: {stage for stage in STAGES if key in result_keys(stage)} for key in changed} == changed
    assert "cluster.memory_gib_per_node" in read_keys("plan") and "cluster.trainings_per_user" not in read_keys("plan")


def test_settings_are_text_and_differences_name_key_and_both_values() -> None:
    old = values_of(make_run(report_to=["wandb"]), make_cluster())
    new = values_of(make_run(learning_rate=5e-4, push={"to": "file:out"}), make_cluster(hang_seconds=60.0))
    assert set(old) == set(KEYS)
    assert differences(old, new) == [
        "learning_rate: 0.001 -> 0.0005", 'report_to: ["wandb"] -> []', "push.to: null -> file:out",
        "cluster.hang_seconds: 600.0 -> 60.0",
    ]  # fmt: skip
    assert differences({"a": "1"}, {"b": "2"}) == ["b: not set -> 2", "a: 1 -> not set"] and differences(old, old) == []


def test_a_path_that_leaves_the_target_of_a_link_is_another_one(tmp_path: Path) -> None:
    (tmp_path / "far/data").mkdir(parents=True)
    (tmp_path / "data").symlink_to("far/data")
    direct, linked, alike = (f"{tmp_path}/{name}.jsonl" for name in ("a", "data/../a", "far/../a"))
    assert differences({"data.train": linked}, {"data.train": direct})
    assert not differences({"data.train": alike}, {"data.train": direct})
