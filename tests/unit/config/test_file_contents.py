"""The content of a run's script and own files counts like a setting."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.effects import CONTENT_KEYS, differences, file_contents, result_keys, values_of
from tests.unit.config.samples import make_run, write
from tests.unit.plans import make_cluster

DEEPSPEED: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}, "communication_data_type": "fp32",
    "steps_per_print": 10, "amp": {"enabled": False},
}  # fmt: skip


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "ds.json", json.dumps(DEEPSPEED))
    write(tmp_path / "accelerate.yaml", "distributed_type: DEEPSPEED\ndebug: true\n")
    write(tmp_path / "train.py", "steps = 1\n")
    return {"deepspeed_config": "ds.json", "accelerate_config": "accelerate.yaml", "script": "train.py"}


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [line.partition(":")[0] for line in differences(before, after)]


def test_a_run_without_own_files_has_the_same_keys() -> None:
    contents = file_contents(make_run())
    assert set(contents) == set(CONTENT_KEYS)
    assert set(contents.values()) == {"null", "{}"}


@pytest.mark.parametrize(("key", "value", "noticed"), [
    ("communication_data_type", "fp16", ["deepspeed_config.content"]),
    ("gradient_clipping", 0.5, ["deepspeed_config.content"]),  # the plan decides it, and refuses another value
    ("torch_autocast", {"enabled": True}, ["deepspeed_config.content"]),  # refused
    ("zero_optimization", {"stage": 3, "reduce_bucket_size": 1000}, ["deepspeed_config.content"]),
    ("zero_optimization", {"stage": 2, "reduce_bucket_size": 2000}, ["deepspeed_config.tuning"]),
    ("wall_clock_breakdown", True, ["deepspeed_config.tuning"]), ("torch_autocast", {"enabled": False}, []),
])  # fmt: skip
def test_an_edit_of_a_deepspeed_file_is_noticed(own: dict[str, str], key: str, value: Any, noticed: list[str]) -> None:
    before = file_contents(make_run(**own))
    write(Path("ds.json"), json.dumps(DEEPSPEED | {key: value}, indent=1))
    assert changed(before, file_contents(make_run(**own))) == noticed


def test_touching_or_formatting_a_file_changes_nothing_but_an_edit_of_a_script_does(own: dict[str, str]) -> None:
    before = file_contents(make_run(**own))
    write(Path("ds.json"), json.dumps(DEEPSPEED, indent=4))
    write(Path("accelerate.yaml"), "# a comment\ndebug: true\ndistributed_type: DEEPSPEED\n")
    Path("train.py").touch()
    assert changed(before, file_contents(make_run(**own))) == []
    write(Path("train.py"), "steps = 2\n")
    assert changed(before, file_contents(make_run(**own))) == ["script.content"]


def test_a_file_that_cannot_be_read_does_not_stop_the_comparison(own: dict[str, str]) -> None:
    write(Path("ds.json"), "{")
    Path("train.py").unlink()
    contents = file_contents(make_run(**own))
    assert [key for key, value in contents.items() if value == "cannot be read"] == [
        "script.content", "deepspeed_config.content", "deepspeed_config.tuning",
    ]  # fmt: skip


def test_the_name_of_an_own_file_does_not_matter_but_its_content_does(own: dict[str, str]) -> None:
    write(Path("other.json"), json.dumps(DEEPSPEED))
    before = values_of(make_run(**own), make_cluster())
    after = values_of(make_run(**own | {"deepspeed_config": "other.json"}), make_cluster())
    assert changed(before, after) == ["deepspeed_config"]
    assert "deepspeed_config" not in result_keys("train") and "deepspeed_config.content" in result_keys("train")
