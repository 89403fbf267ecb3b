"""Child processes: import path, deadlines, answers of nvidia-smi."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmake.core import process
from shardmake.core.errors import DataError, ShardmakeError
from shardmake.core.process import absolute_python_path, ask_nvidia_smi, query_gpus, wait_for_output, within_limits
from tests.programs import install_programs


def test_path_of_a_child_in_another_folder_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty entry of PYTHONPATH is the current folder; a relative one would change its meaning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f":lib:{os.pathsep}/opt")
    package, *rest = absolute_python_path(os.environ).split(os.pathsep)
    assert (Path(package) / "shardmake").is_dir() and rest == [str(tmp_path / "lib"), "/opt"]


def output_of(script: str, seconds: float = 10) -> str | None:
    return wait_for_output(subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True), seconds)


def test_output_counts_only_with_status_0() -> None:
    assert output_of("echo 4 GPUs") == "4 GPUs\n" and output_of("echo 4 GPUs; exit 9") is None


def test_a_process_that_cannot_be_killed_does_not_block_the_caller() -> None:
    """A process in a call to a broken driver gets the signal but does not end."""
    child = subprocess.Popen(["sleep", "5"], stdout=subprocess.PIPE, text=True)
    killed: list[bool] = []
    child.kill = lambda: killed.append(True)  # type: ignore[method-assign]
    started = time.monotonic()
    assert wait_for_output(child, 0.2) is None and killed and time.monotonic() - started < 3
    child.terminate()
    child.communicate()


def fail() -> None:
    raise DataError("line 3 is not JSON")


@pytest.mark.parametrize(("function", "message"), [
    (lambda: time.sleep(60), r"^Rendering failed: it took longer than 1 s\. .*Use another one"),
    (lambda: [0] * 10**9, r"^Rendering failed: it needed more than 64 MiB\."),
    (lambda: os._exit(9), r"^Rendering failed: a library ended the process with status 9\."),
    (lambda: os._exit(0), r"^Rendering failed: a library ended the process with status 0\."),
    (os.abort, r"^Rendering failed: a library ended the process with status -6\."), (fail, r"^line 3 is not JSON$"),
], ids=["sleeps", "allocates", "exits", "exits with 0", "aborts", "refuses"])  # fmt: skip
def test_a_child_within_limits_ends_in_a_sentence(function: Callable[[], object], message: str) -> None:
    started = time.monotonic()
    with pytest.raises(ShardmakeError, match=message):
        within_limits("Rendering", function, seconds=1, memory=64 << 20)
    assert time.monotonic() - started < 30 and within_limits("Rendering", lambda: ["ok"], seconds=60) == ["ok"]


@pytest.mark.parametrize(("script", "answer"), [
    ('echo "$@"', "--query-gpu=uuid --format=csv,noheader,nounits\n"), ("echo No devices were found; exit 6", ""),
    ("exec sleep 60", None), (None, None),
], ids=["answers", "fails", "hangs", "missing"])  # fmt: skip
def test_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, answer: str | None) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if script:
        install_programs(tmp_path, monkeypatch, {"nvidia-smi": script})
    monkeypatch.setattr(process, "SECONDS", 0.5 if answer is None else 30.0)
    assert query_gpus("uuid") == answer
    assert script != 'echo "$@"' or ask_nvidia_smi("-q", "-x") == "-q -x\n"
