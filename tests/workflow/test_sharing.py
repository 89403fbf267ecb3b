"""Two real users of one group on one runs folder and one hub cache. Needs root, which becomes each of them."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.finished_run import make_run
from tests.hub import READER, FakeHub

ADA, BOB, LAB = 42001, 42002, 42100
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"1" * 1000}
# Becomes the user only after one fetch into a folder of its own: a user need not be able to read this Python's
# libraries, which are all loaded by then.
PRELUDE = """
import json, os, sys, tempfile
from pathlib import Path
from huggingface_hub import constants
from shardmake.config.models import Run
from shardmake.fetch.stage import fetch
from shardmake.core.atomic import write_json
from shardmake.run.paths import RunDir
from shardmake.core.permissions import share
run = Run.model_validate(json.loads(os.environ["RUN"]))
rundir = RunDir(Path("runs", os.environ["NAME"]))
cache = constants.HF_HUB_CACHE
with tempfile.TemporaryDirectory() as elsewhere:
    constants.HF_HUB_CACHE = elsewhere
    fetch(run, RunDir(Path(elsewhere, "run")))
constants.HF_HUB_CACHE = cache
user, lab = int(os.environ["USER_ID"]), int(os.environ["LAB_ID"])
os.setgroups([lab])
os.setgid(user)
os.setuid(user)
os.umask(0o077)
print("begin", flush=True)
if "ALONE" not in os.environ:
    share(rundir.root, Path(os.environ["HF_HOME"]))
"""

pytestmark = pytest.mark.root


@pytest.fixture
def lab() -> Iterator[Path]:
    """A folder that belongs to the lab's group, reachable for both users."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        shared = folder / "project"
        shared.mkdir()
        os.chown(shared, ADA, LAB)
        shared.chmod(0o2775)
        (shared / "train.jsonl").write_text("{}\n")
        yield shared


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub(tmp_path / "hub") as server:
        server.add("lab/base", FILES)
        yield server


def run_as(user: int, lab: Path, script: str, hub: FakeHub, name: str = "chat") -> subprocess.CompletedProcess[str]:
    """Run ``script`` as ``user``, whose own group and umask are as strict as they come."""
    run = make_run(model="lab/base", data={"train": "train.jsonl"})
    variables = {
        "HF_ENDPOINT": hub.url, "HF_TOKEN": READER, "HF_HOME": str(lab / "cache"), "HOME": str(lab / f"home-{user}"),
        "RUN": run.model_dump_json(), "NAME": name, "USER_ID": str(user), "LAB_ID": str(LAB),
    }  # fmt: skip
    command = [sys.executable, "-c", PRELUDE + script]
    return subprocess.run(command, cwd=lab, env={**os.environ, **variables}, capture_output=True, text=True)


def test_one_cache_serves_both(lab: Path, hub: FakeHub) -> None:
    first = run_as(ADA, lab, "fetch(run, rundir)", hub, "ada")
    assert first.returncode == 0, first.stderr
    hub.add("lab/base", {**FILES, "config.json": b'{"new": 1}'})
    second = run_as(BOB, lab, "fetch(run, rundir)", hub, "bob")
    assert second.returncode == 0, second.stderr
    third = run_as(ADA, lab, "rundir.sources.unlink(); fetch(run, rundir)", hub, "ada")
    assert third.returncode == 0, third.stderr


def test_everything_is_the_groups(lab: Path, hub: FakeHub) -> None:
    done = run_as(ADA, lab, "fetch(run, rundir)", hub)
    assert done.returncode == 0, done.stderr
    for path in [lab / "runs", *(lab / "runs").rglob("*")]:
        found = path.stat()
        assert found.st_gid == LAB and found.st_mode & stat.S_IRGRP and found.st_mode & stat.S_IWGRP, path


def test_the_other_reads_receipts_replaces_them_and_asks_to_stop(lab: Path, hub: FakeHub) -> None:
    run_as(ADA, lab, "fetch(run, rundir); write_json(rundir.plan, {'by': 'ada'}); rundir.train.mkdir()", hub)
    script = "print(rundir.plan.read_text()); rundir.stop_file.touch(); write_json(rundir.plan, {'by': 'bob'})"
    done = run_as(BOB, lab, script, hub)
    assert done.returncode == 0 and "ada" in done.stdout, done.stderr
    assert (lab / "runs/chat/train/STOP").exists()
    assert "bob" in run_as(ADA, lab, "print(rundir.plan.read_text())", hub).stdout


def test_without_sharing_the_other_is_kept_out(lab: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALONE", "1")
    assert run_as(ADA, lab, "write_json(rundir.plan, {})", hub).returncode == 0
    done = run_as(BOB, lab, "print(rundir.plan.read_text())", hub)
    assert done.returncode != 0 and "Permission denied" in done.stderr
