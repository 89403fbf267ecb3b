import subprocess
import sys
from pathlib import Path

import pytest

from shardmake.caches import hub_environment, kernel_caches

SETTING = "import shardmake.cli, sys; print(*sorted({'huggingface_hub', 'torch', 'transformers', 'datasets'} & {*sys.modules}))"


def test_the_lab_has_one_cache_and_nodes_ask_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_environment(None, offline=False) == {}
    assert hub_environment("cache", offline=False) == {"HF_HOME": str(tmp_path / "cache")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    assert hub_environment(None, offline=True) == offline


def test_the_command_line_sets_them_before_anybody_reads_them() -> None:
    """The hub's libraries read their variables when they are imported."""
    done = subprocess.run([sys.executable, "-c", SETTING], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_kernels_are_compiled_into_a_folder_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def folders(user: int) -> set[str]:
        monkeypatch.setattr("os.getuid", lambda: user)
        return set(kernel_caches("/scratch").values())

    assert all(folder.startswith("/scratch/shardmake-42001/") for folder in folders(42001))
    assert folders(42001).isdisjoint(folders(42002))
