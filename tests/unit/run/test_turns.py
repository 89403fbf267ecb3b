"""Trainings that wait for their turn at the GPUs."""

import threading
from pathlib import Path

import pytest

from shardmake.launch.gpu_status import parse_gpus
from shardmake.launch.gpus import check_gpus
from shardmake.run.turns import VARIABLE, wait_for_turn

USED = parse_gpus("0, GPU-a, 40960, 580.1, 9.0, 0, Default\n")


def test_a_rank_waits_for_the_file_of_its_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_turn("demo-001")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "demo-001.go").touch()
    beats: list[None] = []
    thread = threading.Thread(target=wait_for_turn, args=("demo-002", 1, lambda: beats.append(None)))
    thread.start()
    while not (tmp_path / "demo-002.1.waiting").exists() or len(beats) < 2:
        assert thread.is_alive()
    (tmp_path / "demo-002.go").touch()
    thread.join(10)
    assert not thread.is_alive()


def test_trainings_that_take_turns_may_find_the_gpus_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [finding.found for finding in check_gpus(USED, None, 1)] == ["GPU 0 is in use: 40.0 GiB"]
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert check_gpus(USED, None, 1) == []
