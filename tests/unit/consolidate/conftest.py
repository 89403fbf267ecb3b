"""A checkpoint and a base model of one tensor, whose class transformers is not asked about."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardmake.consolidate import merge_plan, verify
from shardmake.consolidate.loading import LoadingReport


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter a folder with the checkpoint ``run/checkpoint-2`` and the base model ``base``."""
    for module in (merge_plan, verify):
        monkeypatch.setattr(module, "check_loading", lambda *_: LoadingReport("Tiny"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for folder in ("run/checkpoint-2", "base"):
        Path(folder).mkdir(parents=True)
        save_file({"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, Path(folder, "model.safetensors"))
        Path(folder, "config.json").write_text('{"model_type": "tiny"}')
