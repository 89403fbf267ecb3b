"""Locks of kernel builds: those of killed processes are removed, those of living ones are not."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from shardmake.core import build_locks
from shardmake.core.build_locks import LOCKED_BY_THE_SYSTEM, LONGEST_BUILD_SECONDS, remove_stale_locks

BUILD = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("building", flush=True)
time.sleep(600)
"""
LOAD = """
import sys
from torch.utils.cpp_extension import load
print(load("tiny", [sys.argv[1]], is_python_module=False, verbose=True))
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock's path; these tests may run in a container."""
    monkeypatch.setattr(build_locks, "_process_namespace", lambda: build_locks._HOST_PROCESSES)
    monkeypatch.setattr(build_locks, "version", lambda _: "2.13.0")
    (tmp_path / "kernels/tiny").mkdir(parents=True)
    return tmp_path / "kernels/tiny/lock"


@pytest.fixture
def owner(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock as torch does."""
    with subprocess.Popen([sys.executable, "-c", BUILD, str(lock)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "building\n"
        yield process
        process.kill()


def test_only_the_lock_of_a_killed_build_is_removed(lock: Path, owner: subprocess.Popen[str]) -> None:
    assert remove_stale_locks(lock.parent.parent) == []
    assert lock.exists(), "its owner lives"
    owner.kill()
    owner.wait()
    assert remove_stale_locks(lock.parent.parent) == [
        f"Removed {lock}: a process that was killed while it built a kernel left this lock behind."
    ]
    assert not lock.exists() and remove_stale_locks(lock.parent.parent) == []
    assert remove_stale_locks(lock.parent / "missing") == []


def test_the_file_of_a_lock_of_the_system_stays(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock.touch()
    monkeypatch.setattr(build_locks, "version", lambda _: "2.14.1")
    assert remove_stale_locks(lock.parent.parent) == [] and lock.exists()


@pytest.mark.skipif(Version(version("torch")) >= LOCKED_BY_THE_SYSTEM, reason="its lock ends with its owner")
def test_torch_waits_for_a_leftover_lock_and_builds_after_its_removal(lock: Path) -> None:
    source = lock.with_name("tiny.cpp")
    source.write_text("int answer = 42;\n")
    lock.touch()
    variables = {**os.environ, "TORCH_EXTENSIONS_DIR": str(lock.parent.parent)}
    command = [sys.executable, "-c", LOAD, str(source)]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as build:
        with pytest.raises(subprocess.TimeoutExpired):
            build.wait(20)
        build.kill()
    assert len(remove_stale_locks(lock.parent.parent)) == 1
    built = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    assert lock.with_name("tiny.so").exists() and not lock.exists()


@pytest.mark.parametrize(("kind", "namespace", "age", "removed"), [
    ("ext4", build_locks._HOST_PROCESSES, 0, True), ("nfs4", build_locks._HOST_PROCESSES, 60, False),
    ("nfs4", build_locks._HOST_PROCESSES, LONGEST_BUILD_SECONDS + 60, True),
    ("lustre", build_locks._HOST_PROCESSES, 60, False), ("overlay", "pid:[4026532200]", 0, True),
    ("ext4", "pid:[4026532200]", 60, False), ("ext4", "pid:[4026532200]", LONGEST_BUILD_SECONDS + 60, True),
])  # fmt: skip
def test_an_owner_that_may_run_elsewhere_keeps_its_lock_for_an_hour(
    lock: Path, monkeypatch: pytest.MonkeyPatch, kind: str, namespace: str, age: float, removed: bool
) -> None:
    lock.touch()
    os.utime(lock, (time.time() - age,) * 2)
    monkeypatch.setattr(build_locks, "_RELEASE_SECONDS", 0.0)
    monkeypatch.setattr(build_locks, "mount_of", lambda folder, mounts: ("device", "/", kind))
    monkeypatch.setattr(build_locks, "_process_namespace", lambda: namespace)
    messages = remove_stale_locks(lock.parent.parent)
    assert len(messages) == 1 and messages[0].startswith(f"Removed {lock}" if removed else f"Ranks may wait for {lock}")
    assert lock.exists() != removed and [path.name for path in lock.parent.iterdir()] == ([] if removed else ["lock"])


def test_a_lock_that_its_owner_is_about_to_delete_is_not_touched(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch closes the file first and deletes it then; without the file its own deletion would fail."""
    lock.touch()
    monkeypatch.setattr(build_locks.time, "sleep", lambda seconds: lock.unlink())
    assert remove_stale_locks(lock.parent.parent) == []
