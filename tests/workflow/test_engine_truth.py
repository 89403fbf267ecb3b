"""The real engine, with Trainer and DeepSpeed on two CPU ranks, does what the comparison of settings predicts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardmake.render.comparison import Settings
from tests.fork_server import REPOSITORY, launched_environment, rank_environment
from tests.planted_settings import PLANTED, Planted

pytestmark = [pytest.mark.training, pytest.mark.timeout(1800)]
VERIFIED = [planted for planted in PLANTED if planted.engine is not None]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Train all cases and their twins; each has its own two ranks, forked from one process."""
    folder = tmp_path_factory.mktemp("engine")
    settings = {one.name: one.fault for one in VERIFIED} | {f"{one.name}, corrected": one.corrected for one in VERIFIED}
    cases = [
        {"trainer": one.trainer, "deepspeed": one.deepspeed, "environment": environment(one, folder)}
        for one in settings.values()
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.workflow.engine_cases", "cases.json", "results.json"]
    command[3:] = [str(folder / name) for name in command[3:]]
    subprocess.run(command, cwd=REPOSITORY, env=rank_environment(), check=True)
    return dict(zip(settings, json.loads((folder / "results.json").read_text()), strict=True))


def environment(settings: Settings, folder: Path) -> dict[str, str]:
    """Return the variables that the real launcher sets for the ranks."""
    if settings.accelerate is None:
        return {}
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(settings.accelerate))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(folder / "accelerate.yaml")]
    return launched_environment([*launch, *settings.flags, "--num_cpu_threads_per_process", "1", "-m", "x"], folder)


@pytest.mark.parametrize("planted", VERIFIED, ids=lambda planted: planted.name)
def test_the_engine_does_what_is_predicted(planted: Planted, trained: dict[str, dict[str, Any]]) -> None:
    found = trained[planted.name]
    if isinstance(planted.engine, str):
        assert found.get("error") == planted.engine
        return
    assert "error" not in found, found
    assert planted.engine is not None
    assert {key: found[key] for key in planted.engine} == planted.engine


@pytest.mark.parametrize("planted", VERIFIED, ids=lambda planted: planted.name)
def test_the_corrected_twin_trains(planted: Planted, trained: dict[str, dict[str, Any]]) -> None:
    found = trained[f"{planted.name}, corrected"]
    assert found.get("class") == "DeepSpeedEngine", found
    if isinstance(planted.engine, dict):
        is_same = {key: found[key] for key in planted.engine} == planted.engine
        assert is_same == planted.has_no_effect


def test_trainer_accumulates_its_own_number(trained: dict[str, dict[str, Any]]) -> None:
    """Without the key, the engine counts 1, and Trainer's loop still makes one step of 4 micro batches."""
    alone, corrected = (trained[f"accumulation in the arguments only{end}"] for end in ("", ", corrected"))
    assert alone["losses"] == corrected["losses"]
    assert alone["norms"] == corrected["norms"]
    assert (alone["accumulation"], corrected["accumulation"]) == (1, 4)


def test_what_cannot_run_here_has_a_reason() -> None:
    unverified = [one for one in PLANTED if one.engine is None]
    assert [one.name for one in unverified] == ["NVMe without a folder", "an optimizer that offload replaces"]
    assert all(one.unverified for one in unverified)
