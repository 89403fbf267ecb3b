"""Child processes: modules that exchange JSON with their parent, deadlines, and an end together with the parent."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardmake.core import errors
from shardmake.core.errors import ShardmakeError
from shardmake.core.failures import explain

_PR_SET_PDEATHSIG = 1
_USER_ERROR = 2
NEUTRAL_FOLDER = Path("/")
"""Current folder of a process that must not find a user's files by relative names."""


def run_module(module: str, request: Any, environment: Mapping[str, str], folder: Path | None = None) -> Any:
    """Run ``python -m module`` with ``request`` as JSON on its input and return its JSON output.

    The module calls `answer_request`. Its own process keeps torch out of the caller's memory, and isolates the caller
    from a crash in a library or in a model's code. No module is imported from the current folder (``-P``, and no empty
    entry in PYTHONPATH), and no question of a library can be answered, because the input ends with the request.

    Args:
        module: The module to run.
        request: A JSON-like value.
        environment: The environment of the process.
        folder: Its current folder; by default that of this process.

    Raises:
        ShardmakeError: The module raised one; its subclass is preserved.
        RuntimeError: The process failed; the message ends with its standard error.
    """
    environment = {**environment, "PYTHONPATH": absolute_python_path(environment)}
    done = _run(module, json.dumps(request), environment, folder)
    if done.returncode == _USER_ERROR:
        kind, _, message = done.stdout.partition("\n")
        raise getattr(errors, kind, ShardmakeError)(message)
    if done.returncode:
        raise RuntimeError(f"{module} {_end(done.returncode)}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def _run(
    module: str, text: str, environment: Mapping[str, str], folder: Path | None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-W", "ignore", "-m", module]
    return subprocess.run(command, input=text, capture_output=True, text=True, env=environment, cwd=folder)


def _end(status: int) -> str:
    if status == -signal.SIGKILL:
        return "was killed, most likely because the memory was used up"
    return f"failed with exit status {status}"


def absolute_python_path(environment: Mapping[str, str]) -> str:
    """Return PYTHONPATH for a child process in any folder, which can import this package.

    An empty entry, as in ``PYTHONPATH=a:``, would mean the child's current folder.
    """
    inherited = environment.get("PYTHONPATH", "").split(os.pathsep)
    paths = [Path(__file__).parents[2], *(Path(path) for path in inherited if path)]
    return os.pathsep.join(dict.fromkeys(str(path.absolute()) for path in paths))


def answer_request(handler: Callable[[Any], Any]) -> None:
    """Apply ``handler`` to the request of `run_module` and write the result as JSON to standard output.

    Everything that libraries print goes to standard error instead.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with output:
        try:
            output.write(json.dumps(handler(json.load(sys.stdin))))
        except Exception as error:
            known = explain(error, Path())
            if known is None:
                raise
            output.write(f"{type(known).__name__}\n{known}")
            sys.exit(_USER_ERROR)


def die_with_parent() -> None:
    """Let the kernel end this process with SIGKILL as soon as its parent ends.

    This has no effect if the parent has ended already. The caller therefore compares `os.getppid` with the expected
    process id.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_for_output(process: subprocess.Popen[str], seconds: float) -> str | None:
    """Return the output of ``process``, or None if it fails or does not end within ``seconds``.

    A late process is killed but not waited for, because a process in state D does not end.
    """
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return None
    return printed if process.returncode == 0 else None


SECONDS = 60.0
"""Without the persistence daemon, the driver needs many seconds to start eight GPUs."""


def ask_nvidia_smi(*options: str) -> str | None:
    """Return what nvidia-smi prints, empty if it fails; None if it is missing or does not answer in time."""
    try:
        process = subprocess.Popen(
            ["nvidia-smi", *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None
    answer = wait_for_output(process, SECONDS)
    return "" if answer is None and process.returncode is not None else answer


def query_gpus(fields: str) -> str | None:
    """Return a row of comma-separated ``fields`` for each GPU, as `ask_nvidia_smi` does."""
    return ask_nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
