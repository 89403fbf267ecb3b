"""Kill the merge at every write: no damaged model is left behind, and the next merge completes the same files."""

import functools
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmake.consolidate import merge_plan, writer
from shardmake.consolidate.loading import LoadingReport, load
from shardmake.consolidate.merge import consolidate
from tests.kill_at_write import status_of
from tests.workflow.consolidate_checkpoints import trained

pytestmark = pytest.mark.training
EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


@pytest.fixture
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.getbasetemp(), "zero", 3) / "zero3-tied"


@pytest.fixture(autouse=True)
def check_loading_once(monkeypatch: pytest.MonkeyPatch, variant: Path) -> None:
    """Use one real report of transformers for all merges of this test."""
    report = report_of(variant / "base")
    monkeypatch.setattr(merge_plan, "check_loading", lambda *_: report)


@functools.cache
def report_of(folder: Path) -> LoadingReport:
    return load(folder, trust_remote_code=False)


def killed_at(event: int, out: Path, work: Callable[[], None]) -> int:
    """Run ``work`` and kill it just before its ``event``-th change to the disk near ``out``."""

    def run() -> None:
        seen = itertools.count(1)
        watch(out, lambda: os.kill(os.getpid(), signal.SIGKILL) if next(seen) == event else None)
        work()

    return status_of(run)


def events_of(out: Path, work: Callable[[], None]) -> int:
    """Return the number of changes that ``work`` makes to the disk near ``out``."""
    log = out.parent.parent / "events"

    def run() -> None:
        seen: list[None] = []
        watch(out, lambda: seen.append(None))
        work()
        log.write_text(str(len(seen)))

    assert status_of(run) == 0
    return int(log.read_text())


def watch(out: Path, act: Callable[[], None]) -> None:
    """Call ``act`` before each change to the disk near ``out`` until this process ends."""

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        writes = name == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        path = str(arguments[0]) if writes or name in EVENTS else "/"
        if str(out.parent) in path or not path.startswith("/"):  # a name in an open folder
            act()

    original_write, original_fsync = writer._write_all, os.fsync
    writer._write_all = lambda *arguments: (act(), original_write(*arguments))
    os.fsync = lambda file: (act(), original_fsync(file))[1]
    sys.addaudithook(hook)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "over an older model"])
def test_kill_at_every_write(variant: Path, tmp_path: Path, replaces: bool) -> None:
    """Over an older model, kill at every write of the final replacement and at some of the writes before it."""

    def work() -> None:
        consolidate(variant, out, base=variant / "base", max_shard_size="20KB", dtype="bf16", overwrite=True)

    out = tmp_path / "reference" / "model"
    out.parent.mkdir()
    points = events_of(out, work)
    assert points > 40
    complete = content(out)
    assert len([name for name in complete if name.endswith(".safetensors")]) > 1
    out = tmp_path / "runs" / "model"
    before = {"config.json": b"{}", "model.safetensors": b"old"} if replaces else {}
    for point in [*range(1, points - 12, 6 if replaces else 1), *range(points - 12, points + 12)]:
        shutil.rmtree(out.parent, ignore_errors=True)
        out.mkdir(parents=True)
        for name, old in before.items():
            (out / name).write_bytes(old)
        code = killed_at(point, out, work)
        assert code in (0, -signal.SIGKILL)  # over an empty folder, the final renames are different
        assert content(out) in ([complete] if code == 0 else [before, complete])
        assert status_of(work) == 0
        assert content(out) == complete
        assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_complete_shard_is_not_written_again(variant: Path, tmp_path: Path) -> None:
    """Two tasks write the shards; the merge that follows writes none."""
    from shardmake.checkpoint.formats.registry import read_checkpoint
    from shardmake.consolidate.layout import plan_shards

    contents = read_checkpoint(variant, "bf16")
    stored = [tensor for name, tensor in contents.tensors.items() if name not in contents.aliases]
    shards = plan_shards(stored, "bf16", 10_000)
    for task in (0, 1):
        assert not writer.ShardWriter(shards, tmp_path).is_complete()
        writer.ShardWriter(shards, tmp_path).write(part=(task, 2))
    complete = writer.ShardWriter(shards, tmp_path)
    assert complete.is_complete()
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    complete.write()
    complete.check_sums()
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
