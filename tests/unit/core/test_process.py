"""Child processes: JSON in and out, errors, deadlines."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from shardmake.core.errors import ModelError, ShardmakeError
from shardmake.core.process import run_module, wait_for_output

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
    print("a library's banner")
    os.system("echo a compiler's banner")
    return {"doubled": 2 * request}

answer_request(handle)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``child_module`` can be imported."""
    (tmp_path / "child_module.py").write_text(MODULE)
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}


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
