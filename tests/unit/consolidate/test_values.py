"""Values that a merge refuses, and unusual ones that it reports."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardmake.checkpoint.formats.dtypes import Target
from shardmake.checkpoint.formats.huggingface import read_file
from shardmake.consolidate import merge_plan, scan, verify
from shardmake.consolidate.loading import LoadingReport
from shardmake.consolidate.merge import consolidate
from shardmake.core.errors import CheckpointError, ModelError, ShardmakeError

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers' check report a class with ``w`` and ``v`` only."""

    def check(folder: Path, *_: object) -> LoadingReport:
        names = {tensor.name for path in folder.glob("*.safetensors") for tensor in read_file(path)}
        return LoadingReport("Tiny", unexpected=tuple(sorted(names - {"w", "v"})))

    for module in (merge_plan, verify):
        monkeypatch.setattr(module, "check_loading", check)


def write(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    save_file({"w": torch.ones(4, 2), "v": torch.zeros(3), **tensors}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny", "dtype": "float32"}))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("rows", "expected"), [
    ([[1, 2], [-INF, -INF], [-INF, -INF]], 2), ([[1, 2], [-INF, 3]], None), ([[1, 2], [INF, INF]], None),
    ([[-INF, NAN], [1, 1]], None), ([[-INF, -INF]], 1),
])  # fmt: skip
def test_rows_of_minus_infinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: list[list[float]], expected: int | None
) -> None:
    monkeypatch.setattr(scan, "_BLOCK", 8)
    save_file({"w": torch.tensor(rows, dtype=dtype)}, tmp_path / "model.safetensors")
    (tensor,) = read_file(tmp_path / "model.safetensors")
    assert scan.infinite_rows(tensor) == expected


def test_zeros_and_banned_rows_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write(tmp_path / "run", w=torch.zeros(4, 2), v=torch.tensor([1.0, -INF, 0]))
    receipt = consolidate(source, tmp_path / "model")
    assert receipt is not None
    assert receipt.verification.zero_matrices == ["w"] and receipt.verification.infinite_rows == {"v": 1}
    assert receipt.verification.remarks() == ["w is all zero.", "1 rows of v are -inf."]
    assert all(remark in caplog.messages for remark in receipt.verification.remarks())
    assert verify.verify(tmp_path / "model", source).remarks() == receipt.verification.remarks()


@pytest.mark.parametrize(
    ("value", "dtype"), [(NAN, "keep"), (INF, "keep"), (-INF, "keep"), (-70000.0, "fp16")], ids=str
)
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float, dtype: Target) -> None:
    """A value is not finite in the checkpoint, or too large for fp16."""
    source = write(tmp_path / "run", w=torch.tensor([[1.0, value], [1.0, 1.0]]))
    with pytest.raises(ModelError, match="w holds values that are not finite"):
        consolidate(source, tmp_path / "model", dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_unexpected_tensors_are_kept_on_request(tmp_path: Path) -> None:
    source = write(tmp_path / "run", **{"v_head.weight": torch.ones(1, 2)})
    with pytest.raises(CheckpointError, match=r"add --allow unexpected(.|\n)*v_head\.weight is not part of Tiny"):
        consolidate(source, tmp_path / "model")
    receipt = consolidate(source, tmp_path / "model", allow=["unexpected"])
    assert receipt is not None and receipt.allowed == ["unexpected"]
    assert receipt.verification.unexpected == ["v_head.weight"]
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == {"w", "v", "v_head.weight"}
    found = verify.verify(tmp_path / "model", source)
    assert found.remarks() == ["v_head.weight is not part of Tiny."]
    (tmp_path / "model" / "receipt.json").unlink()
    with pytest.raises(ShardmakeError, match=r"v_head\.weight is not part of Tiny"):
        verify.verify(tmp_path / "model")


def test_types_of_a_mixed_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Frozen parameters in bf16 beside trained ones in fp32."""
    caplog.set_level("INFO")
    receipt = consolidate(write(tmp_path / "run", w=torch.ones(4, 2, dtype=torch.bfloat16)), tmp_path / "model")
    assert receipt is not None
    found: dict[str, Any] = receipt.verification.dtypes
    assert found == {"bfloat16": 8, "float32": 3} and receipt.verification.dtype == "float32"
    assert "bfloat16 (8), float32 (3)" in caplog.text
