"""One pass over a model's files, in parts that several threads read."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardmake.checkpoint.formats import huggingface
from shardmake.consolidate import scan as module
from shardmake.consolidate.scan import ModelScan, scan
from shardmake.core.fingerprint import fingerprint

TENSORS = {
    "bias": np.zeros(7, np.float32), "embedding": np.arange(600, dtype=np.float32).reshape(30, 20),
    "head": np.linspace(-1, 1, 500, dtype=np.float16).reshape(20, 25), "zeros": np.zeros((40, 11), np.float32),
}  # fmt: skip


@pytest.fixture(params=[64, 1000, 1 << 20], autouse=True)
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few elements up to whole tensors, each read in blocks of half of them."""
    monkeypatch.setattr(module, "_PART", request.param)
    monkeypatch.setattr(module, "_BLOCK", request.param // 2)


def scan_of(folder: Path, changes: dict[str, np.ndarray] | None = None, workers: int = 3) -> ModelScan:
    save_file(TENSORS | (changes or {}), folder / "model.safetensors")
    return scan(folder, workers)


def test_sums_are_those_of_the_file_and_of_each_tensor(tmp_path: Path) -> None:
    found = scan_of(tmp_path)
    path = tmp_path / "model.safetensors"
    assert found.files == {path.name: fingerprint(path)}
    for tensor in huggingface.read_file(path):
        piece = tensor.pieces[0]
        begin = piece.record.offset + piece.start
        (tmp_path / "bytes").write_bytes(path.read_bytes()[begin : begin + tensor.nbytes])
        assert f"{found.tensors[tensor.name]:08x}" == fingerprint(tmp_path / "bytes").crc32, tensor.name


def test_zeros_are_those_of_whole_tensors(tmp_path: Path) -> None:
    found = scan_of(tmp_path)
    assert (found.zero, found.zero_matrices, found.problems) == (["bias"], ["zeros"], [])
    last = TENSORS["zeros"].copy()
    last[-1, -1] = 1e-30
    assert scan_of(tmp_path, {"zeros": last}).zero_matrices == []


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (14, 7), (29, 19)])
def test_a_value_that_is_not_finite_is_found_anywhere(tmp_path: Path, place: tuple[int, int], value: float) -> None:
    embedding = TENSORS["embedding"].copy()
    embedding[place] = value
    (problem,) = scan_of(tmp_path, {"embedding": embedding}).problems
    assert problem.startswith("embedding holds values that are not finite")


def test_rows_of_infinity_are_counted(tmp_path: Path) -> None:
    embedding = TENSORS["embedding"].copy()
    embedding[[3, 29]] = -np.inf
    found = scan_of(tmp_path, {"embedding": embedding})
    assert (found.infinite_rows, found.problems) == ({"embedding": 2}, [])


def test_every_byte_of_a_tensor_is_counted_once(tmp_path: Path) -> None:
    counted: list[int] = []
    scan_of(tmp_path)
    scan(tmp_path, 3, counted.append)
    assert sum(counted) == sum(array.nbytes for array in TENSORS.values())
