"""Uploads from the scratch folders of two nodes: only complete checkpoints are committed, whenever a process dies."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shardmake.checkpoint import store
from shardmake.checkpoint.node_files import listing_path, merge_listings
from shardmake.checkpoint.record import find_problems
from shardmake.core.fingerprint import FileEntry, fingerprint
from shardmake.run.training_settings import Retention
from shardmake.train import upload
from shardmake.train.async_saver import ScratchFolder
from shardmake.train.upload import UploadRequest
from tests.checkpoint_record import describe
from tests.kill_at_write import Killer, points
from tests.workflow.checkout import wait_for

FILES = {
    0: {"global_step4/rank0.pt": b"0" * 5000, "latest": b"global_step4", "rng_state_0.pth": b"r0"},
    1: {"global_step4/rank1.pt": b"1" * 5000, "rng_state_1.pth": b"r1"},
}
DESCRIBED = {**describe(4), "step": 4, "versions": {}}


class Site:
    """A shared folder with a checkpoint of step 2, and the scratch folders of two nodes that have saved step 4."""

    def __init__(self, root: Path) -> None:
        self.root, self.attempt, self.shared = root, root / "attempts/001", root / "checkpoints"
        self.staged = store.staging_folder(self.shared, 1) / "checkpoint-4"
        at = root / "scratch"
        self.scratch = [ScratchFolder(at / f"node-{node}", at, self.attempt, node, 2, 0.5) for node in (0, 1)]

    def save(self) -> "Site":
        self.attempt.mkdir(parents=True)
        before = store.staging_folder(self.shared, 1) / "checkpoint-2"
        write(before, {"latest": b"global_step2"})
        entries = {"latest": fingerprint(before / "latest")}
        store.commit_and_prune(before, entries, {**DESCRIBED, "step": 2}, time.time(), Retention())
        for node, contents in FILES.items():
            write(self.local(node), contents)
        return self

    def local(self, node: int) -> Path:
        return self.scratch[node].folder / "checkpoint-4"

    def start_upload(self, node: int) -> "subprocess.Popen[str]":
        described, started = {**DESCRIBED, "blocked_seconds": 0.5}, time.time() - 60
        return self.scratch[node].start_upload(self.local(node), self.staged, described, started, Retention(keep=1))

    def request(self, node: int) -> UploadRequest:
        return UploadRequest(
            local=self.local(node), staged=self.staged, attempt=self.attempt, node=node, nodes=2, parent=os.getpid(),
            described=DESCRIBED, started=time.time(), retention=Retention(keep=1),
        )  # fmt: skip

    def found(self) -> tuple[int, list[str]]:
        """Return the step that a driver would resume from, and the content of the shared folder after that."""
        newest = store.recover(self.shared)
        assert newest is not None and not find_problems(newest[1])
        return newest[0].step, sorted(path.name for path in self.shared.iterdir())


def write(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path).save()


@pytest.mark.parametrize("first", [0, 1])
def test_two_nodes_upload_and_one_commits(site: Site, first: int) -> None:
    uploads = [site.start_upload(node) for node in (first, 1 - first)]
    assert [process.wait() for process in uploads] == [0, 0], [process.stderr for process in uploads]
    ((record, path),) = store.committed(site.shared)
    assert {name: (path / name).read_bytes() for name in record.files} == FILES[0] | FILES[1]
    assert (record.step, record.rng_states, record.blocked_seconds) == (4, 2, 0.5)
    assert 60 <= record.save_seconds < 120
    assert site.found() == (4, ["checkpoint-4"])
    assert not any(site.local(node).exists() for node in (0, 1))


def test_files_of_several_nodes_must_be_equal() -> None:
    one, other = FileEntry(size=1, crc32="00000001"), FileEntry(size=1, crc32="00000002")
    assert merge_listings([{"a": one, "c": one}, {"b": other, "c": one}]) == {"a": one, "b": other, "c": one}
    with pytest.raises(RuntimeError, match="Two nodes wrote c with different content"):
        merge_listings([{"c": one}, {"c": other}])


def test_upload_ends_with_its_rank(site: Site) -> None:
    """The rank is a process that uploads the part of node 0 and waits. Its child waits for node 1."""
    request = site.request(0).model_copy(update={"parent": 0})
    rank = f"""
import os, subprocess, sys, time
request = {request.model_dump_json()!r}.replace('"parent":0', f'"parent":{{os.getpid()}}')
print(subprocess.Popen([sys.executable, "-m", "shardmake.train.upload", request]).pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", rank], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    wait_for(lambda: not site.local(0).exists())
    assert child.is_running() and child.status() != psutil.STATUS_ZOMBIE, "it waits for node 1"
    process.kill()
    process.wait()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert site.found() == (2, ["checkpoint-2"])

    write(site.local(0), FILES[0])
    request = site.request(0).model_copy(update={"parent": process.pid})
    command = [sys.executable, "-m", "shardmake.train.upload", request.model_dump_json()]
    late = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert late.returncode == 1 and "the rank that saved has ended" in late.stderr
    assert site.found() == (2, ["checkpoint-2"])


def upload_and_die(site: Site, node: int, log: Path, at: int, mode: str) -> int:
    """Return the exit status of a process that uploads ``node``'s files one by one and dies at write ``at``."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        upload._WORKERS = 1
        Killer(site.root, log, at, mode).install()
        upload.run_upload(site.request(node))
        os._exit(0)
    finally:
        os._exit(1)


def branch(source: Site, target: Path) -> Site:
    shutil.copytree(source.root, target)
    return Site(target)


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_at_every_write_of_each_node(tmp_path: Path, victim: int) -> None:
    started = Site(tmp_path / "started").save()
    complete = branch(started, tmp_path / "complete")
    logs = [tmp_path / f"writes-{node}" for node in (0, 1)]
    assert [upload_and_die(complete, node, logs[node], -1, "before") for node in (1, 0)] == [0, 0]
    writes = points(logs[victim])
    assert {what.split()[0] for _, _, what in writes} == {"open", "fsync", "os.rename", "os.remove", "os.rmdir"}
    assert len(writes) > 12

    steps = []
    for at, mode, what in writes:
        site = branch(started, tmp_path / f"{at}-{mode}")
        if victim == 0:
            assert upload_and_die(site, 1, tmp_path / "log", -1, "before") == 0
        assert upload_and_die(site, victim, tmp_path / f"{at}-{mode}.log", at, mode) == -signal.SIGKILL, what
        if victim == 1 and listing_path(site.staged, 1).exists():
            assert upload_and_die(site, 0, tmp_path / "log", -1, "before") == 0
        step, left = site.found()
        assert set(left) <= {"checkpoint-2", "checkpoint-4"}, "recovery removes everything else"
        assert all(not find_problems(site.shared / name) for name in left), what
        steps.append(step)
        shutil.rmtree(site.root)
    assert steps == sorted(steps), "the checkpoint is committed by one write"
    assert set(steps) == {2, 4}
