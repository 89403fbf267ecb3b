"""The checksums of the output are made while it is copied, and the read-back is compared with them."""

import itertools
import os
import signal
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shardmake.checkpoint.formats.contents import StoredTensor
from shardmake.consolidate import merge_plan, writer
from shardmake.consolidate.layout import PlannedTensor
from shardmake.consolidate.loading import LoadingReport
from shardmake.consolidate.merge import consolidate
from shardmake.consolidate.scan import OutputSums
from shardmake.core.errors import CheckpointError
from tests.checkpoint_record import flip

WEIGHTS = {name: np.arange(60, dtype=np.float32).reshape(6, 10) + at for at, name in enumerate(("a", "b", "c"))}


@given(st.data())
def test_sum_is_the_crc32_of_the_tensor_whatever_the_parts(data: st.DataObject) -> None:
    """Parts in any order: boxes of a matrix, as rows with gaps between them."""
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    matrix = np.frombuffer(data.draw(st.binary(min_size=rows * columns, max_size=rows * columns)), np.uint8)
    matrix = matrix.reshape(rows, columns)
    cuts = sorted(data.draw(st.sets(st.integers(0, columns))) | {0, columns})
    boxes = data.draw(st.permutations(list(itertools.pairwise(cuts))))
    planned = PlannedTensor(StoredTensor("w", "U8", (rows, columns), ()), "U8", 100)
    sums = OutputSums()
    for low, high in boxes:
        sums.add(np.ascontiguousarray(matrix[:, low:high]), 100 + low, columns, planned)
    assert sums.by_tensor == {"w": zlib.crc32(matrix.tobytes())}


@pytest.fixture(autouse=True)
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a checkpoint of three matrices, which become a file each."""
    monkeypatch.setattr(merge_plan, "check_loading", lambda *_: LoadingReport("Tiny"))
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    save_file(WEIGHTS, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    return folder


def kill_after(files: int, checkpoint: Path, out: Path) -> None:
    """Start the merge in a fork and kill it when it has finished ``files`` files."""
    child = os.fork()
    if child == 0:
        finish = writer.ShardWriter._finish
        finished = []

        def finish_or_die(self: writer.ShardWriter, *arguments: object) -> None:
            finish(self, *arguments)  # type: ignore[arg-type]
            finished.append(None)
            if len(finished) == files:
                os.kill(os.getpid(), signal.SIGKILL)

        writer.ShardWriter._finish = finish_or_die  # type: ignore[method-assign]
        consolidate(checkpoint, out, max_shard_size="240", workers=1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_every_output_byte_is_compared(checkpoint: Path, tmp_path: Path) -> None:
    receipt = consolidate(checkpoint, tmp_path / "model", max_shard_size="240")
    assert receipt is not None
    assert receipt.output_bytes_compared == sum(path.stat().st_size for path in tmp_path.glob("model/*.safetensors"))


@pytest.mark.parametrize(("byte", "what"), [
    (-1, "changed after it was written: [abc] is not what the checkpoint gave"), (20, "is not a complete"),
])  # fmt: skip
def test_bit_that_flips_between_kill_and_next_merge(checkpoint: Path, tmp_path: Path, byte: int, what: str) -> None:
    kill_after(2, checkpoint, tmp_path / "model")
    finished = sorted((tmp_path / ".model.partial").glob("model-*.safetensors"))
    assert len(finished) == 2
    flip(finished[0], byte)
    with pytest.raises(CheckpointError, match=what):
        consolidate(checkpoint, tmp_path / "model", max_shard_size="240")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert consolidate(checkpoint, tmp_path / "model", max_shard_size="240") is not None


def test_damaged_journal(checkpoint: Path, tmp_path: Path) -> None:
    kill_after(1, checkpoint, tmp_path / "model")
    (journal,) = (tmp_path / ".model.partial").glob(".*.done")
    journal.write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="its content is not what"):
        consolidate(checkpoint, tmp_path / "model", max_shard_size="240")
    assert not (tmp_path / ".model.partial").exists()


def test_bit_that_flips_before_the_disk(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = writer.OutputFile.sync

    def damage(self: writer.OutputFile) -> None:
        os.pwrite(self._file, b"\x99", os.fstat(self._file).st_size - 2)
        sync(self)

    monkeypatch.setattr(writer.OutputFile, "sync", damage)
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed after it was written: [abc] is not"):
        consolidate(checkpoint, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
