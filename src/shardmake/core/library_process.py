"""A child process that imports torch and transformers once and answers the requests of this package's helper modules.

Each request runs in a process that is forked from it. The fork has what was imported, which takes seconds, and memory,
environment, folder and exit status of its own: what a request patches never reaches the next one, and a crash or the
kernel's out-of-memory killer ends one request alone. The fork is safe because its parent has one thread and has only
imported: no parallel region of OpenMP and no CUDA context exists yet. The pages of the libraries stay shared.
"""

import atexit
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from shardmake.core import errors
from shardmake.core.environment import UNUSED, hidden
from shardmake.core.errors import ShardmakeError
from shardmake.core.failures import explain
from shardmake.core.private_names import private
from shardmake.core.process import NEUTRAL_FOLDER, absolute_python_path, die_with_parent, end_fork

_PRINTED = 4000
"""Last bytes of standard error in the message of a failed request."""

_SECONDS, _MEMORY = 1800, 32 << 30
"""Limits of one request: the estimate of the largest known model takes a small part of both."""


class LibraryProcess:
    """The process; it starts with the first request, and again if the next one has another environment.

    Libraries read the environment when they are imported, so an import serves one environment only.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._environment: Mapping[str, str] = {}

    def ask(
        self, module: str, request: Any, environment: Mapping[str, str], folder: Path | None, libraries: Sequence[str]
    ) -> Any:
        """Return the answer of ``module`` as `run_module` does."""
        if self._process is None or self._process.poll() is not None or environment != self._environment:
            self.close()
            self._start(environment)
        assert self._process and self._process.stdin and self._process.stdout
        printed = os.fstat(self._errors.fileno()).st_size
        try:
            with suppress(BrokenPipeError):  # the process was killed
                order = [libraries, module, request, str(folder or Path.cwd())]
                print(json.dumps(order), file=self._process.stdin, flush=True)
            reply = self._process.stdout.readline()
        except BaseException:  # such as Ctrl-C; the next request must not read this one's answer
            self.close()
            raise
        status, text = json.loads(reply) if reply else (self._process.wait(), "")
        if status:
            raise RuntimeError(f"{module} {_end(status)}:\n{self._printed_since(printed)}")
        answer = json.loads(text)
        if "error" in answer:
            raise getattr(errors, answer["error"], ShardmakeError)(answer["message"])
        return answer["answer"]

    def _start(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-P", "-W", "ignore", "-m", __name__, str(os.getpid())]
        self._environment = environment
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment,
            cwd=NEUTRAL_FOLDER,
        )  # fmt: skip

    def _printed_since(self, start: int) -> str:
        descriptor = self._errors.fileno()
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, _PRINTED, max(start, size - _PRINTED)).decode(errors="replace")

    def close(self) -> None:
        """End the process and a request that it still answers."""
        if self._process is not None:
            assert self._process.stdin and self._process.stdout
            self._process.kill()
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait()
            self._errors.close()
            self._process = None


_shared: ContextVar[LibraryProcess | None] = ContextVar("shared", default=None)
"""Of this thread: the kernel ends a process when the thread that started it ends."""


@contextmanager
def one_library_process() -> Iterator[LibraryProcess]:
    """Let all `run_module` of a block, or of a function that this decorates, share one process."""
    if (outer := _shared.get()) is not None:
        yield outer
        return
    process = LibraryProcess()
    token = _shared.set(process)
    try:
        yield process
    finally:
        _shared.reset(token)
        process.close()


def run_module(
    module: str, request: Any, environment: Mapping[str, str], folder: Path | None = None, libraries: Sequence[str] = ()
) -> Any:
    """Return ``module.answer(request)`` from a child process in ``folder``, which sees and returns JSON data.

    A process of its own keeps torch out of the caller's memory, and isolates the caller from a crash in a library or in
    a model's code. No module is imported from the current folder (``-P``, and no empty entry in PYTHONPATH), no
    question of a library can be answered, because the input is empty, and everything that libraries print goes to
    standard error.

    The ``libraries`` are imported once for all requests that share the process. A `ShardmakeError` of the module is
    raised here with its class; a `RuntimeError` if the process failed.
    """
    with one_library_process() as process:
        path = absolute_python_path(environment)
        return process.ask(module, request, {**environment, "PYTHONPATH": path}, folder, libraries)


def _end(status: int) -> str:
    if status == -signal.SIGALRM:
        return f"took longer than {_SECONDS} s"
    if status == -signal.SIGKILL:
        return "was killed, most likely because the memory was used up"
    return f"failed with exit status {status}"


# --- in the child process ---------------------------------------------------------------------------------------------


def _serve(parent: int) -> None:
    """Answer the requests on standard input until it ends; the kernel ends this process with its parent before that."""
    die_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    this = os.getpid()
    while os.getppid() == parent and (line := sys.stdin.readline()):
        libraries, *order = json.loads(line)
        _import_libraries(libraries)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            end_fork(writer, partial(_answer, this, *order), _SECONDS, _MEMORY)
        os.close(writer)
        answer = _read_answer(reader)
        os.close(reader)
        _, status = os.waitpid(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), answer]), file=replies, flush=True)


def _import_libraries(names: Sequence[str]) -> None:
    gc.set_threshold(100_000)  # what is imported stays
    with hidden(*UNUSED), suppress(Exception):  # the fork repeats an import that fails, and reports its error
        for name in names:
            import_module(name)
    gc.freeze()  # a collection in a fork would copy the memory of all that is imported


def _read_answer(reader: int) -> str:
    """Return what the fork writes; end this process, and with it the fork, if the request's pipe ends before."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([0, reader], [], [])
        if 0 in ready:
            os._exit(1)
        if not (part := os.read(reader, 2**20)):
            return b"".join(parts).decode()
        parts.append(part)


def _answer(parent: int, module: str, request: Any, folder: str) -> bytes:
    """Return the module's answer, in the process that was forked for it."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    if os.getppid() != parent:
        sys.exit(1)
    answer = import_module(module).answer
    try:
        found = {"answer": answer(request)}
    except Exception as error:
        known = explain(error, Path())
        if known is None:
            raise
        found = {"error": type(known).__name__, "message": str(known)}
    finally:
        private(atexit).run_exitfuncs()
    return json.dumps(found).encode()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
