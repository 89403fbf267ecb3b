"""Files for torch.load, laid out without torch: what torch, zipfile and our own reader find in them."""

import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardmake.checkpoint.formats import unpickle
from shardmake.checkpoint.formats.dtypes import FROM_TORCH, ITEM_SIZE, torch_name
from shardmake.checkpoint.formats.unpickle import numel
from shardmake.consolidate import torchzip

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def content_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage().tolist())


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    contents = [content_of(tensor) for tensor in tensors.values()]
    described = [
        (name, FROM_TORCH[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape), len(content))
        for (name, tensor), content in zip(tensors.items(), contents, strict=True)
    ]
    plan = torchzip.plan(described)
    with path.open("wb") as file:
        file.write(plan.start)
        for record, content in zip(plan.records[len(plan.small) :], contents, strict=True):
            file.seek(record.begin)
            file.write(content)
        for offset, content in plan.closing([zlib.crc32(content) for content in contents]):
            file.seek(offset)
            file.write(content)
    assert path.stat().st_size == plan.size


@given(st.lists(st.tuples(st.sampled_from(sorted(ITEM_SIZE)), SHAPES), max_size=8))
def test_torch_loads_every_type_and_shape(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, tuple[int, ...]]]
) -> None:
    generator = np.random.default_rng(0)
    tensors = {}
    for index, (dtype, shape) in enumerate(kinds):
        tensor = torch.empty(shape, dtype=getattr(torch, torch_name(dtype)))
        bits = generator.integers(0, 2, numel(shape) * ITEM_SIZE[dtype], dtype=np.uint8)
        tensor.untyped_storage().copy_(torch.from_numpy(bits).untyped_storage())
        tensors[f"layer.{index}"] = tensor
    path = tmp_path_factory.mktemp("zip") / "model.bin"
    write(path, tensors)
    assert zipfile.ZipFile(path).testzip() is None
    ours = unpickle.load(path)
    for loaded in (torch.load(path, weights_only=True), torch.load(path, weights_only=True, mmap=True)):
        assert list(loaded) == list(tensors) == list(ours)
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape == ours[name].shape
            assert content_of(loaded[name]) == content_of(tensor)


def test_beyond_4_gib(tmp_path: Path) -> None:
    """A sparse file: places and sizes need 64 bits."""
    plan = torchzip.plan([("large", "U8", (5 << 30,), 5 << 30), ("small", "F32", (3,), 12)])
    with (tmp_path / "model.bin").open("wb") as file:
        file.write(plan.start)
        file.seek(plan.records[-1].begin)
        file.write(np.array([1, 2, 3], np.float32).tobytes())
        for offset, content in plan.closing([0, 0]):
            file.seek(offset)
            file.write(content)
    loaded = torch.load(tmp_path / "model.bin", weights_only=True, mmap=True)
    assert loaded["large"].shape == (5 << 30,) and loaded["small"].tolist() == [1, 2, 3]
    assert [info.file_size for info in zipfile.ZipFile(tmp_path / "model.bin").infolist()][-2:] == [5 << 30, 12]
    assert unpickle.load(tmp_path / "model.bin")["small"].record.offset == plan.records[-1].begin
