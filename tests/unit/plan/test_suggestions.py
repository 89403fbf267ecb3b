import re
from pathlib import Path

import pytest

from shardmake.core.errors import ShardmakeError
from shardmake.plan.stage import plan_run
from shardmake.plan.suggestions import Suggestion, changes, suggestions
from shardmake.run.paths import RunDir
from tests.unit.plan.test_planner import folders, gpus, run_of

__all__ = ["folders"]


def test_the_smallest_change_of_each_setting_is_suggested() -> None:
    enough = {"nodes": 8, "sequence_length": 512, "method": "qlora"}

    def outcome(setting: str, value: int | str) -> str | None:
        helps = {
            "nodes": lambda: value >= 8,
            "sequence_length": lambda: value <= 600,
            "method": lambda: value != "lora",
        }
        return "fits" if helps[setting]() else None

    found = suggestions(changes(2, 2048, "full"), outcome)
    assert found == [Suggestion(setting, value, "fits") for setting, value in enough.items()]
    assert suggestions(changes(2, 2048, "lora"), lambda setting, value: None) == []


def test_the_plan_suggests_single_changes_if_nothing_fits(folders: dict[str, str], tmp_path: Path) -> None:
    run = run_of(folders["eight"], strategy="ddp", nodes=1, global_batch_size=64)
    with pytest.raises(ShardmakeError) as caught:
        plan_run(run, gpus(), RunDir(tmp_path / "chat"))
    said = str(caught.value)
    assert "Strategy ddp does not fit" in said
    assert re.search(r"\n  strategy: auto \(zero\S+, .*, 1 node: [0-9.]+ GiB per GPU\)", said)
    assert "\n  method: lora (ddp, no checkpointing, micro batch 8, 1 node: " in said
    assert "nodes:" not in said, "ddp shards nothing"
    assert not (tmp_path / "chat/plan.json").exists()
