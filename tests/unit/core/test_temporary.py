import contextlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmake.core.temporary import process_folder, temporary_folder

OFFLOAD = "from shardmake.core.temporary import process_folder; folder = str(process_folder('offload', sys.argv[1]))"
USERS = {
    "offload": OFFLOAD,
    "fetch": "from shardmake.core.temporary import temporary_folder\n"
    "with temporary_folder('fetch', sys.argv[1]) as folder: wait(folder)",
    "exec": f"{OFFLOAD}; print(folder, flush=True); os.execv('/bin/sleep', ['sleep', '60'])",
}
"""Programs that use a folder in the place that is their argument: until they end, in a block, across an exec."""
WAIT = """
import os, sys, time
def wait(folder):
    open(f"{folder}/model.safetensors", "w").close()
    print(folder, flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def running(user: str, place: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Yield a process that uses a folder below ``place``, and the folder; kill the process at the end."""
    program = f"{WAIT}{USERS[user]}\nwait(folder)"
    process = subprocess.Popen([sys.executable, "-c", program, place], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("user", USERS)
def test_the_next_process_removes_what_a_killed_one_left(tmp_path: Path, user: str) -> None:
    with running(user, tmp_path) as (_, folder):
        assert folder.is_relative_to(tmp_path)
        with temporary_folder("other", tmp_path):
            assert folder.is_dir(), "its process is alive"
    assert folder.is_dir(), "SIGKILL leaves it"
    with running("offload", tmp_path) as (_, following):
        assert not folder.parent.exists() and following.is_dir()
    with temporary_folder("other", tmp_path):
        pass
    assert not any(tmp_path.iterdir())


def test_a_process_that_ends_removes_its_folder(tmp_path: Path) -> None:
    for end, status in (("", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)):
        done = subprocess.run([sys.executable, "-c", f"import sys; {OFFLOAD}\n{end}", tmp_path], stderr=subprocess.PIPE)
        assert done.returncode == status and not any(tmp_path.iterdir())
    with running("offload", tmp_path) as (_, folder):
        pass
    (folder / "model.safetensors").unlink()
    folder.rmdir()
    process_folder("other", tmp_path)
    assert not folder.parent.exists(), "a removal that was killed is repeated"


def test_a_folder_is_empty_and_of_this_user_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o2777)
    before = os.umask(0)
    try:
        with temporary_folder("check", tmp_path) as folder:
            assert not any(folder.iterdir())
            assert [stat.S_IMODE(path.stat().st_mode) & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    "kind", [pytest.param("foreign", marks=pytest.mark.root), "host", "open", "link", "file", "kernels"]
)
def test_nothing_else_is_removed(tmp_path: Path, kind: str) -> None:
    with running("offload", tmp_path / ".") as (_, folder):
        pass
    other = folder.parent.with_name(f"{folder.parent.name}-other")
    if kind == "foreign":
        os.chown(folder.parent, 12345, 12345)
    elif kind == "host":
        folder.parent.rename(tmp_path / folder.parent.name.replace(socket.gethostname(), f"{socket.gethostname()}-2"))
    elif kind == "open":
        folder.parent.chmod(0o770)
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.parent.rename(tmp_path / "elsewhere/mine")
        other.symlink_to(tmp_path / "elsewhere/mine")
    elif kind == "file":
        other.write_text("notes")
    else:  # the folder of compiled kernels, which is kept
        (folder.parent / ".in-use").unlink()
    before = sorted(tmp_path.rglob("*"))
    with temporary_folder("other", tmp_path):
        pass
    expected = [path for path in before if kind != "file" or not path.is_relative_to(folder.parent)]
    assert sorted(tmp_path.rglob("*")) == expected
