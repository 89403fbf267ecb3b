"""Requests to helper modules: JSON in and out, errors, isolation, one import for several, no process without a parent."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardmake.core.errors import ModelError, ShardmakeError
from shardmake.core.library_process import LibraryProcess, run_module
from shardmake.core.process import NEUTRAL_FOLDER, absolute_python_path

MODULE = r"""
import os, sys, time
from shardmake.core.errors import ModelError

def answer(request):
    if request == "refuse":
        raise ModelError("not a model\nUse another one.")
    if request == "denied":
        raise PermissionError(13, "Permission denied", "base/config.json")
    if request == "crash":
        raise RuntimeError("a bug")
    if request == "abort":
        os.abort()
    if request == "kill":
        os.kill(os.getpid(), 9)
    if request == "kill the process":
        os.kill(os.getppid(), 9)
        time.sleep(60)
    if request == "question":
        return {"answer": input("Do you wish to run the custom code? [y/N] ")}
    if request == "folder":
        return {"folder": os.getcwd(), "path": sys.path}
    if request == "state":
        import slow_library
        slow_library.requests += 1
        return [slow_library.importer, slow_library.requests, os.getppid(), os.environ.get("WORLD_SIZE")]
    print("a library's banner")
    os.system("echo a compiler's banner")
    return {"doubled": 2 * request}
"""
COHERE = {
    "model_type": "cohere", "architectures": ["CohereForCausalLM"], "vocab_size": 1000, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4,
    "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``child_module`` can be imported; an empty entry means the current folder."""
    (tmp_path / "child_module.py").write_text(MODULE)
    (tmp_path / "slow_library.py").write_text("import os\nimporter, requests = os.getpid(), 0\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}:"}


def run(request: Any, environment: dict[str, str]) -> Any:
    return run_module("child_module", request, environment)


def test_errors_of_the_user_and_of_the_system_keep_class_and_message(environment: dict[str, str]) -> None:
    with pytest.raises(ModelError, match=r"^not a model\nUse another one\.$"):
        run("refuse", environment)
    with pytest.raises(ShardmakeError, match=r"Cannot use base/config\.json\. Permission was denied"):
        run("denied", environment)


def test_nothing_here_is_imported(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m`` and ``python -c`` import from the current folder first; what libraries print is not the result."""
    (tmp_path / "downloaded").mkdir()
    monkeypatch.chdir(tmp_path / "downloaded")
    for name in ("json", "random", "queue", "child_module", "shardmake"):
        Path(f"{name}.py").write_text("open('ran', 'w')")
    assert run(21, environment) == {"doubled": 42} and not Path("ran").exists()
    found = run_module("child_module", "folder", environment, NEUTRAL_FOLDER)
    assert found["folder"] == "/" and not {"", "/", str(Path.cwd())} & set(found["path"])


def test_no_question_can_be_answered(environment: dict[str, str]) -> None:
    """As under ``yes | shardmake``: the input of a request is empty."""
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


@pytest.fixture
def ask(environment: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """Ask one process."""
    process = LibraryProcess()
    environment["PYTHONPATH"] = absolute_python_path(environment)
    yield lambda request, **more: process.ask("child_module", request, environment | more, None, ["slow_library"])
    process.close()


@pytest.mark.parametrize(("request_", "message"), [
    ("crash", r"child_module failed with exit status 1:\n(.*\n)*RuntimeError: a bug"),
    ("abort", r"child_module failed with exit status -6:"),
    ("kill", r"child_module was killed, most likely because the memory was used up:"),
])  # fmt: skip
def test_a_request_that_fails_leaves_the_process_intact(request_: str, message: str, ask: Callable[..., Any]) -> None:
    before = ask("state")
    with pytest.raises(RuntimeError, match=message):
        ask(request_)
    assert ask("state") == before


def test_requests_share_imports_and_no_state(ask: Callable[..., Any]) -> None:
    importer, requests, parent, _ = ask("state")
    assert (importer, requests, None) == (parent, 1, ask("state")[3]) and ask("state")[:3] == [importer, 1, parent]


def test_another_environment_has_another_process(ask: Callable[..., Any]) -> None:
    first, second = ask("state"), ask("state", WORLD_SIZE="4")
    assert second[3] == "4" and second[2] != first[2] and not psutil.pid_exists(first[2])


def test_a_killed_process_fails_one_request(ask: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="was killed, most likely because the memory was used up"):
        ask("kill the process")
    assert ask(21) == {"doubled": 42}


def test_kill_9_of_an_estimate_leaves_no_process(tmp_path: Path) -> None:
    """The kernel ends the tracer with its command, also within a call to C++ code."""
    (tmp_path / "config.json").write_text(json.dumps(COHERE))
    command = [sys.executable, "-m", "shardmake.cli", "estimate", str(tmp_path)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    estimate = psutil.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    tree: list[psutil.Process] = []
    while len(tree) < 2 or not list(tmp_path.glob("cache/shardmake/inspect_model-*.json")):  # then it traces
        assert estimate.poll() is None
        tree = estimate.children(recursive=True)
        time.sleep(0.01)
    estimate.kill()
    estimate.wait()
    _, alive = psutil.wait_procs(tree, timeout=10)
    assert len(tree) == 2 and alive == []
