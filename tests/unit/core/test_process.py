"""Child processes: JSON in and out, errors, deadlines."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from shardmake.core.errors import ModelError, ShardmakeError
from shardmake.core.process import NEUTRAL_FOLDER, absolute_python_path, run_module, wait_for_output

MODULE = r"""
import os, sys
from shardmake.core.errors import ModelError
from shardmake.core.process import answer_request

def handle(request):
    if request == "refuse":
        raise ModelError("not a model\nUse another one.")
    if request == "denied":
        raise PermissionError(13, "Permission denied", "base/config.json")
    if request == "crash":
        sys.exit("out of memory")
    if request == "question":
        return {"answer": input("Do you wish to run the custom code? [y/N] ")}
    if request == "folder":
        return {"folder": os.getcwd(), "path": sys.path}
    print("a library's banner")
    os.system("echo a compiler's banner")
    return {"doubled": 2 * request}

answer_request(handle)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``child_module`` can be imported; an empty entry means the current folder."""
    (tmp_path / "child_module.py").write_text(MODULE)
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}:"}


def run(request: Any, environment: dict[str, str]) -> Any:
    return run_module("child_module", request, environment)


def test_the_result_is_separate_from_what_libraries_print(environment: dict[str, str]) -> None:
    assert run(21, environment) == {"doubled": 42}


def test_an_error_of_the_user_keeps_its_class_and_message(environment: dict[str, str]) -> None:
    with pytest.raises(ModelError, match=r"^not a model\nUse another one\.$"):
        run("refuse", environment)


def test_an_error_of_the_system_becomes_one_of_the_user(environment: dict[str, str]) -> None:
    with pytest.raises(ShardmakeError, match=r"Cannot use base/config\.json\. Permission was denied"):
        run("denied", environment)


def test_a_crash_shows_standard_error(environment: dict[str, str]) -> None:
    with pytest.raises(RuntimeError, match=r"child_module failed with exit status 1:\nout of memory"):
        run("crash", environment)


def test_nothing_of_the_current_folder_is_imported(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python -m`` and ``python -c`` import from the current folder first, before the standard library."""
    (tmp_path / "downloaded").mkdir()
    monkeypatch.chdir(tmp_path / "downloaded")
    for name in ("json", "random", "queue", "child_module", "shardmake"):
        Path(f"{name}.py").write_text("open('ran', 'w')")
    assert run(21, environment) == {"doubled": 42}
    assert not Path("ran").exists()
    found = run_module("child_module", "folder", environment, NEUTRAL_FOLDER)
    assert found["folder"] == "/" and not {"", "/", str(Path.cwd())} & set(found["path"])


def test_no_question_can_be_answered(environment: dict[str, str]) -> None:
    """As under ``yes | shardmake``: the child's input ends with the request."""
    reader, writer = os.pipe()
    os.write(writer, b"y\n" * 100)
    kept = os.dup(0)
    os.dup2(reader, 0)
    try:
        with pytest.raises(RuntimeError, match="EOFError"):
            run("question", environment)
    finally:
        for descriptor in (reader, writer):
            os.close(descriptor)
        os.dup2(kept, 0)
        os.close(kept)


def test_path_of_a_child_in_another_folder_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty entry of PYTHONPATH is the current folder; a relative one would change its meaning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f":lib:{os.pathsep}/opt")
    package, *rest = absolute_python_path(os.environ).split(os.pathsep)
    assert (Path(package) / "shardmake").is_dir() and rest == [str(tmp_path / "lib"), "/opt"]


def output_of(script: str, seconds: float = 10) -> str | None:
    return wait_for_output(subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True), seconds)


def test_output_counts_only_with_status_0() -> None:
    assert output_of("echo 4 GPUs") == "4 GPUs\n"
    assert output_of("echo 4 GPUs; exit 9") is None


def test_a_process_that_cannot_be_killed_does_not_block_the_caller() -> None:
    """A process in a call to a broken driver gets the signal but does not end."""
    process = subprocess.Popen(["sleep", "5"], stdout=subprocess.PIPE, text=True)
    killed: list[bool] = []
    process.kill = lambda: killed.append(True)  # type: ignore[method-assign]
    started = time.monotonic()
    assert wait_for_output(process, 0.2) is None
    assert killed and time.monotonic() - started < 3
    process.terminate()
    process.communicate()
