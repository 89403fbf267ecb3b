"""A push that is killed at any of its requests, then repeated, ends as one that was not."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest

from shardmake.core.manifest import read_folder
from shardmake.push.stage import push
from shardmake.run.paths import RunDir
from tests.finished_run import DRAWN, MODEL, PLOTS, WEIGHTS, make_run, make_rundir, write_model
from tests.hub import FakeHub

RUN = make_run(push={"to": "hub:lab/chat"})
FOLDER_RUN = make_run(push={"to": "file:published/chat"})
OLD = {"config.json": b"old", "model.safetensors": b"old"}
NEW = {"config.json": b"new", "model.safetensors": b"new"}


def push_and_die(hub: FakeHub, root: Path, at: int) -> bool:
    """Push in a process of its own that is killed when its request number ``at`` arrives; whether it came so far."""
    hub.requests.clear()
    process = multiprocessing.get_context("fork").Process(target=push, args=(RUN, make_rundir(root)))
    hub.before = lambda: os.kill(process.pid or 0, signal.SIGKILL) if len(hub.requests) == at else None
    process.start()
    process.join()
    hub.before = lambda: None
    return process.exitcode == -signal.SIGKILL


def contents(hub: FakeHub) -> dict[str, bytes]:
    files = hub.files("lab/chat")
    return {name: hub.content("lab/chat", name) for name in files if name not in (".gitattributes", "README.md")}


def test_killed_at_every_request(hub: FakeHub, tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path / "old")
    write_model(rundir, OLD)
    push(RUN, rundir)
    old, start = contents(hub), len(hub.repositories["lab/chat"].commits)
    at = 1
    while push_and_die(hub, tmp_path / "new", at):
        found = contents(hub)
        assert found == old or {name: found.get(name) for name in MODEL} == MODEL, f"half a model at request {at}"
        at += 1
    assert at > 8, "the pushes were killed at several places"
    whole = [entry for entry in hub.received if entry[1] == len(next(iter(WEIGHTS.values())))]
    assert len(whole) == len(set(whole)) == len(WEIGHTS), "what has arrived is not sent again"
    assert {name: contents(hub)[name] for name in MODEL} == MODEL
    assert contents(hub).keys() == {*MODEL, *PLOTS, "SHA256SUMS"}
    assert len(hub.repositories["lab/chat"].commits) == start + 1


def push_to_folder_and_die(root: Path, at: int) -> bool:
    """Push to ``published/chat`` in a process that kills itself before its change number ``at`` to ``published``."""

    def work() -> None:
        changes = 0

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal changes
            if event in ("os.mkdir", "os.rename", "shutil.copyfile", "os.remove", "os.rmdir"):
                changes += any("published" in str(argument) or ".chat" in str(argument) for argument in arguments)
                if changes == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        push(FOLDER_RUN, RunDir(root))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    return process.exitcode == -signal.SIGKILL


def holds_model(folder: Path) -> bool:
    return all((folder / name).is_file() and (folder / name).read_bytes() == NEW[name] for name in NEW)


@pytest.mark.parametrize("in_one_step", [True, False])
def test_killed_at_every_change_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_one_step: bool) -> None:
    monkeypatch.chdir(tmp_path)
    if not in_one_step:
        monkeypatch.setattr("shardmake.core.run_folder.exchange", lambda one, other: False)
    monkeypatch.setattr("shardmake.push.bundle.card_plots", lambda *_: DRAWN)
    old, new = make_rundir(tmp_path / "old", OLD), make_rundir(tmp_path / "new", NEW)
    target = tmp_path / "published" / "chat"
    at, places = 1, set()
    while True:
        push(FOLDER_RUN, old)
        before = read_folder(target)
        if not push_to_folder_and_die(new.root, at):
            break
        places.add(target.exists())
        if target.exists():
            assert read_folder(target) == before or holds_model(target), f"half a model at change {at}"
        push(FOLDER_RUN, new)
        assert holds_model(target)
        assert [path.name for path in target.parent.iterdir()] == ["chat"], f"leftovers after change {at}"
        at += 1
    assert places == ({True} if in_one_step else {True, False}), "without a model only between two renames"
