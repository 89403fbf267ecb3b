"""Kill the merge at every point: nothing that looks whole is not, and the next merge ends as if nothing had been."""

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

from shardmake.consolidate import merge, output, writer
from shardmake.consolidate.loading import Loading, load
from shardmake.consolidate.merge import consolidate
from tests.workflow.consolidate_checkpoints import trained

pytestmark = pytest.mark.training
EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


@pytest.fixture
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.getbasetemp(), "zero", 3) / "zero3-tied"


@pytest.fixture(autouse=True)
def ask_transformers_once(monkeypatch: pytest.MonkeyPatch, variant: Path) -> None:
    """Its real answer, the same for every one of the many merges here."""
    answer = answer_about(variant / "base")
    monkeypatch.setattr(merge, "try_loading", lambda *_: answer)


@functools.cache
def answer_about(folder: Path) -> Loading:
    return load(folder, trust_remote_code=False)


def forked(work: Callable[[], None]) -> int:
    """Run ``work`` in a copy of this process; its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(event: int, out: Path, work: Callable[[], None]) -> int:
    """Run ``work``, and kill it as it is about to do its ``event``-th change to the disk near ``out``."""

    def run() -> None:
        seen = itertools.count(1)
        watch(out, lambda: os.kill(os.getpid(), signal.SIGKILL) if next(seen) == event else None)
        work()

    return forked(run)


def events_of(out: Path, work: Callable[[], None]) -> int:
    """How many changes to the disk near ``out`` the whole of ``work`` makes."""
    log = out.parent.parent / "events"

    def run() -> None:
        seen: list[None] = []
        watch(out, lambda: seen.append(None))
        work()
        log.write_text(str(len(seen)))

    assert forked(run) == 0
    return int(log.read_text())


def watch(out: Path, act: Callable[[], None]) -> None:
    """Call ``act`` before each change to the disk near ``out``, from now on until this process ends."""

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        writes = name == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or name in EVENTS) and str(out.parent) in str(arguments[0]):
            act()

    original_write, original_fsync = output._write_all, os.fsync
    output._write_all = lambda *arguments: (act(), original_write(*arguments))
    os.fsync = lambda file: (act(), original_fsync(file))[1]
    sys.addaudithook(hook)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "over an older model"])
def test_killed_at_every_point(variant: Path, tmp_path: Path, replaces: bool) -> None:
    """Over an older model, every point of the end, where that is replaced, and some of what is the same before."""

    def work() -> None:
        consolidate(variant, out, base=variant / "base", max_shard_size="20KB", dtype="bf16")

    out = tmp_path / "reference" / "model"
    out.parent.mkdir()
    points = events_of(out, work)
    assert points > 40
    whole = content(out)
    assert len([name for name in whole if name.endswith(".safetensors")]) > 1
    out = tmp_path / "runs" / "model"
    before = {"config.json": b"{}", "model.safetensors": b"old"} if replaces else {}
    for point in [*range(1, points - 12, 6 if replaces else 1), *range(points - 12, points + 12)]:
        shutil.rmtree(out.parent, ignore_errors=True)
        out.mkdir(parents=True)
        for name, old in before.items():
            (out / name).write_bytes(old)
        code = killed_at(point, out, work)
        assert code in (0, -signal.SIGKILL)  # over an empty folder, the renames at the end are others
        assert content(out) in ([whole] if code == 0 else [before, whole])
        assert forked(work) == 0
        assert content(out) == whole
        assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_a_shard_that_was_finished_is_not_written_again(variant: Path, tmp_path: Path) -> None:
    """Two tasks share the shards; the merge that follows finds them whole and writes none."""
    from shardmake.checkpoint.formats.registry import read_checkpoint
    from shardmake.consolidate.layout import plan_shards

    contents = read_checkpoint(variant, "bf16")
    stored = [tensor for name, tensor in contents.tensors.items() if name not in contents.aliases]
    shards = plan_shards(stored, "bf16", 10_000)
    for task in (0, 1):
        assert not writer.ShardWriter(shards, tmp_path).is_complete()
        writer.ShardWriter(shards, tmp_path).write(part=(task, 2))
    whole = writer.ShardWriter(shards, tmp_path)
    assert whole.is_complete()
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    whole.write()
    whole.check_sums()
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
