"""Checksums, rounding, boxes and output files; merges of checkpoints that hypothesis generates."""

import errno
import itertools
import json
import math
import os
import struct
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from shardmake.checkpoint.formats.contents import Piece, StoredTensor, box_pieces
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE, torch_name
from shardmake.checkpoint.formats.registry import read_checkpoint
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.consolidate import blocks, layout, stream, writer
from shardmake.consolidate.blocks import PAGE, Block, Converter, page_aligned
from shardmake.consolidate.layout import PlannedTensor, plan_shards
from shardmake.consolidate.writer import ShardWriter

SHAPE = st.lists(st.integers(0, 7), max_size=3).map(tuple)
GROUPS = st.lists(st.lists(SHAPE, min_size=1, max_size=5), min_size=1, max_size=3)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use blocks and jobs of a few bytes, so that tiny tensors are divided as large ones are."""
    monkeypatch.setattr(layout, "BLOCK", 64)
    monkeypatch.setattr(layout, "JOB", 160)
    monkeypatch.setattr(layout, "PAGE", 16)
    monkeypatch.setattr(layout, "_SMALL", 24)
    yield


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_combined_crc32_equals_the_crc32_of_all_bytes(parts: list[bytes]) -> None:
    assert stream.combine_crc32((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(b"".join(parts))


@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("target", ["F32", "F16", "BF16"])
def test_rounding_equals_torch(source: str, target: str) -> None:
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 256, size=200_000 * ITEM_SIZE[source], dtype=np.uint8)
    dtypes = (getattr(torch, torch_name(source)), getattr(torch, torch_name(target)))
    expected = torch.from_numpy(bits.copy()).view(dtypes[0]).to(dtypes[1])
    ours = torch.from_numpy(Converter(200_000).convert(bits, source, target).copy()).view(dtypes[1])
    nan = expected.isnan()
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours[~nan].view(torch.uint8), expected[~nan].view(torch.uint8))


@given(st.data())
def test_boxes_of_a_grid_form_the_tensor(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple))
    cuts = [sorted(data.draw(st.sets(st.integers(1, size - 1))) if size > 1 else []) for size in shape]
    full = np.arange(math.prod(shape)).reshape(shape)
    out = np.full(full.size, -1)
    edges = [list(zip([0, *cut], [*cut, size], strict=True)) for cut, size in zip(cuts, shape, strict=True)]
    for cell in np.ndindex(*(len(edge) for edge in edges)):
        spans = [edge[index] for edge, index in zip(edges, cell, strict=True)]
        stored = full[tuple(slice(*span) for span in spans)].reshape(-1)
        box = tuple(low for low, _ in spans), tuple(high - low for low, high in spans)
        for piece in box_pieces(ZipRecord(Path(), 0, stored.size, None), 0, 1, shape, box):
            for run in range(piece.runs):
                first = piece.start + run * piece.count
                to = piece.at + run * piece.stride
                out[to : to + piece.count] = stored[first : first + piece.count]
    assert (out == full.reshape(-1)).all()


@given(st.lists(st.tuples(SHAPE, st.sampled_from(["F32", "BF16", "I64", "BOOL"])), max_size=12), st.integers(1, 600))
def test_shards_hold_every_tensor_once_with_correct_headers(kinds: list[tuple[Any, str]], limit: int) -> None:
    tensors = [StoredTensor(f"t{index}", dtype, shape, ()) for index, (shape, dtype) in enumerate(kinds)]
    shards = plan_shards(tensors, "keep", limit)
    assert sorted(e.tensor.name for s in shards for e in s.tensors) == sorted(t.name for t in tensors)
    for shard in shards:
        length = struct.unpack("<Q", shard.header[:8])[0]
        header = json.loads(shard.header[8:])
        assert len(shard.header) == 8 + length and length % 8 == 0 and header["__metadata__"] == {"format": "pt"}
        assert sum(entry.nbytes for entry in shard.tensors) <= limit or len(shard.tensors) == 1
        for entry in shard.tensors:
            begin, end = header[entry.tensor.name]["data_offsets"]
            assert begin + len(shard.header) == entry.offset and end - begin == entry.nbytes
            assert entry.offset % ITEM_SIZE[entry.dtype] == 0


def named_tensors(groups: list[list[tuple[int, ...]]]) -> list[OrderedDict[str, torch.Tensor]]:
    values = torch.arange(1.0, 1e6)
    made, at = [], 0
    for index, shapes in enumerate(groups):
        group = OrderedDict()
        for position, shape in enumerate(shapes):
            count = math.prod(shape)
            group[f"g{index}.p{position}"] = values[at : at + count].reshape(shape)
            at += count
        made.append(group)
    return made


def model_state(groups: list[OrderedDict[str, torch.Tensor]], module: dict[str, torch.Tensor]) -> dict[str, Any]:
    shapes = [OrderedDict((name, tensor.shape) for name, tensor in group.items()) for group in groups]
    return {"module": module, "param_shapes": shapes, "buffer_names": [], "shared_params": {}, "global_steps": 1}


def check_merge(folder: Path, groups: list[OrderedDict[str, torch.Tensor]], target: str) -> None:
    contents = read_checkpoint(folder, target)
    writer = ShardWriter(plan_shards(contents.tensors.values(), target, 256), folder / "out")
    writer.write(workers=2)
    assert writer.is_complete()
    writer.check_sums()
    merged = {n: t for file in (folder / "out").glob("*.safetensors") for n, t in load_file(file).items()}
    expected = {name: tensor for group in groups for name, tensor in group.items()}
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(merged[name], tensor.to(merged[name].dtype)), name
        assert merged[name].shape == tensor.shape
        assert merged[name].dtype == (torch.bfloat16 if target == "bf16" else torch.float32)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(GROUPS, st.integers(1, 5), st.sampled_from(["keep", "bf16"]), st.booleans())
def test_zero3_merges_any_shapes(groups: list[list[tuple[int, ...]]], world: int, target: str, subgroups: bool) -> None:
    """Each parameter has ``world`` pieces of equal size; the padding must not appear in the result."""
    params = named_tensors(groups)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        for rank in range(world):
            flat = [torch.cat([_part(t, rank, world) for t in group.values()]) for group in params]
            groups_of_rank = flat if subgroups else [torch.cat(flat)]
            state = {"zero_stage": 3, "partition_count": world, "fp32_flat_groups": groups_of_rank}
            torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
            model = model_state(params, {name: torch.empty(0) for group in params for name in group})
            torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        check_merge(folder, params, target)


def _part(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    size = math.ceil(tensor.numel() / world)
    padded = torch.full((size * world,), -7.0)
    padded[: tensor.numel()] = tensor.reshape(-1)
    return padded[rank * size : (rank + 1) * size]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(GROUPS, st.integers(1, 5), st.sampled_from(["keep", "bf16"]), st.integers(0, 3))
def test_zero2_merges_any_shapes(groups: list[list[tuple[int, ...]]], world: int, target: str, padding: int) -> None:
    """Each group is one vector with a gap after every parameter, divided into slices without the final padding."""
    params = named_tensors(groups)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        gap, paddings = torch.full((padding,), -7.0), [[padding] * len(group) for group in params]
        vectors = [torch.cat([part for t in group.values() for part in (t.reshape(-1), gap)]) for group in params]
        for rank in range(world):
            slices = []
            for vector in vectors:
                size = math.ceil(vector.numel() / (2 * world)) * 2
                slices.append(vector[rank * size : (rank + 1) * size].clone())
            state = {
                "zero_stage": 2, "partition_count": [world] * len(params), "single_partition_of_fp32_groups": slices,
                "param_alignment_paddings": paddings,
            }  # fmt: skip
            torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        half = {name: tensor.half() for group in params for name, tensor in group.items()}
        torch.save(model_state(params, half), folder / "mp_rank_00_model_states.pt")
        check_merge(folder, params, target)


def write_vectors(folder: Path, counts: list[int], gap: int) -> tuple[list[StoredTensor], bytes]:
    """Write consecutive float32 vectors of ``counts`` elements to a file, each followed by ``gap`` elements."""
    content = np.random.default_rng(0).integers(0, 256, 4 * sum(count + gap for count in counts), np.uint8).tobytes()
    (folder / "source").write_bytes(content)
    record = ZipRecord(folder / "source", 0, len(content), zlib.crc32(content))
    tensors, at = [], 0
    for index, count in enumerate(counts):
        tensors.append(StoredTensor(f"t{index}", "F32", (count,), (Piece(record, at, 0, count),)))
        at += 4 * (count + gap)
    return tensors, content


@settings(deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(0, 20), st.booleans())
def test_every_byte_is_read_once(counts: list[int], gap: int, has_crc: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        tensors, content = write_vectors(Path(name), counts, gap)
    if not has_crc:
        record = replace(tensors[0].pieces[0].record, crc=None)
        tensors = [replace(tensor, pieces=(replace(tensor.pieces[0], record=record),)) for tensor in tensors]
    read: list[int] = []
    moved: list[int] = []
    for job in layout.plan_jobs(plan_shards(tensors, "keep", 10**6))[0]:
        for block in layout.read_blocks(job):
            assert 0 < block.end - block.begin <= layout.BLOCK and len(block.parts) <= layout.BLOCK // 4
            read.extend(range(block.begin, block.end))
            for part in block.parts:
                assert block.begin <= part.begin < part.end <= block.end
                moved.extend(range(part.begin, part.end))
    assert moved == [at for t in tensors for at in range(t.pieces[0].start, t.pieces[0].start + t.nbytes)]
    assert read == (list(range(len(content))) if has_crc else moved)


def test_error_in_a_worker_stops_the_stream(tmp_path: Path) -> None:
    tensors, _ = write_vectors(tmp_path, [16] * 50, 0)
    put, done = [], []

    def fail(rows: Block, offset: int, stride: int, target: PlannedTensor) -> None:
        put.append(offset)
        if len(put) == 7:
            raise OSError("no space")

    planned = layout.plan_jobs(plan_shards(tensors, "keep", 10**6))[0]
    with pytest.raises(OSError, match="no space"):
        stream.stream([stream.StreamTask(job, fail, lambda *end: done.append(end)) for job in planned], 2)
    assert len(put) < 12 and len(done) < len(planned)


def test_task_receives_the_checksum_of_its_job(tmp_path: Path) -> None:
    tensors, content = write_vectors(tmp_path, [16, 3, 90], 5)
    (job,) = layout.plan_jobs(plan_shards(tensors, "keep", 10**6))[0][:1]
    done: list[int] = []
    stream.stream([stream.StreamTask(job, lambda *_: None, lambda _, crc: done.append(crc))], 3)
    assert done == [zlib.crc32(content[job.begin : job.end])]


@pytest.mark.parametrize(("cached", "expected"), [(1.0, True), (0.6, True), (0.4, False), (0.0, False)])
def test_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: float, expected: bool) -> None:
    """Probes are spread over the range and do not wait for the disk; unsupported file systems return False."""
    (tmp_path / "file").write_bytes(bytes(1000))
    probed = []

    def preadv(_file: int, buffers: list[bytearray], offset: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        probed.append(offset)
        if offset >= 100 + cached * 800:
            raise BlockingIOError
        return len(buffers[0])

    def unsupported(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "preadv", preadv)
    assert blocks.is_cached(tmp_path / "file", 100, 800) is expected and probed == list(range(100, 900, 50))
    monkeypatch.setattr(os, "preadv", unsupported)
    assert not blocks.is_cached(tmp_path / "file", 100, 800)


@pytest.mark.parametrize(("direct", "has_direct_writes"), [(True, True), (True, False), (False, True)])
def test_output_file_is_written_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, has_direct_writes: bool
) -> None:
    """The pieces begin at and beside page boundaries; some are large enough for direct writes."""
    if not has_direct_writes:
        monkeypatch.setattr(writer, "_open_direct", lambda path: -1)
    size = 3_000_001
    expected = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    cuts = [0, 5, PAGE, 300 * PAGE, 300 * PAGE + 1, 2_000_003, 2_000_003 + 7 * PAGE, size]
    file = writer.OutputFile(tmp_path / "file", size)
    memory = page_aligned(size + PAGE)
    for begin, end in reversed(list(itertools.pairwise(cuts))):
        block = memory[begin % PAGE :][: end - begin]
        block[:] = expected[begin:end]
        file.write(block, begin, direct=direct)
    file.sync()
    file.close()
    assert (tmp_path / "file").read_bytes() == expected.tobytes()
