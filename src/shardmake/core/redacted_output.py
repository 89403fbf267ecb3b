"""Remove secrets from what programs print, before it reaches a terminal or a log that others can read."""

import contextlib
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

from shardmake.core.secrets import known_secrets, redact

_IDLE_SECONDS = 1.0
"""How long the beginning of a line waits for the rest, which may be the rest of a secret."""
_MOST_BYTES = 1 << 16
_END_SECONDS = 2.0
_LINE_ENDS = re.compile(rb"(?<=[\r\n])")


class RedactedStream:
    """A text stream that removes secrets from each text written to it, and is the inner stream in all else.

    A secret that a program writes in several parts is not found, nor is what it writes to ``buffer`` or from another
    process.
    """

    def __init__(self, inner: TextIO) -> None:
        self._inner = inner

    def write(self, text: str) -> int:
        """Write ``text`` without its secrets; return the length of ``text``, as streams do."""
        self._inner.write(redact(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of ``lines``."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def redact_output() -> None:
    """Redact standard output and standard error of this process, tracebacks that Python prints at its end included."""
    sys.stdout, sys.stderr = (cast(TextIO, RedactedStream(stream)) for stream in (sys.stdout, sys.stderr))


@contextlib.contextmanager
def redacted_output() -> Iterator[None]:
    """Redact standard output and standard error of this process meanwhile."""
    out, err = (cast(TextIO, RedactedStream(stream)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


class LogCopy:
    """A thread that appends the output of ``process`` and its children to ``log`` without their secrets.

    The secrets are those of their ``environment``. The thread ends when all of them have ended. They never wait for the
    log: what a full disk does not take is lost.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path, environment: Mapping[str, str]) -> None:
        assert process.stdout is not None, "it is a pipe"
        self._output = process.stdout
        self._secrets = known_secrets(environment)
        self._log = log.open("ab", buffering=0)
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def wait(self, seconds: float = _END_SECONDS) -> None:
        """Wait for the rest of the output of a program that has ended; another one may hold the pipe open."""
        self._thread.join(seconds)

    def _copy(self) -> None:
        with self._output, self._log:
            for lines in _read_lines(self._output.fileno()):
                text = redact(b"".join(lines).decode(errors="replace"), self._secrets)
                with contextlib.suppress(OSError):
                    self._log.write(text.encode())


def _read_lines(pipe: int) -> Iterator[list[bytes]]:
    """Yield the lines that can be read from ``pipe``, and the beginning of one whose rest is late or long."""
    ready = select.poll()
    ready.register(pipe, select.POLLIN)
    held = b""
    while True:
        if held and not ready.poll(_IDLE_SECONDS * 1000):
            yield [held]
            held = b""
        if not (read := os.read(pipe, _MOST_BYTES)):
            break
        *lines, held = _LINE_ENDS.split(held + read)
        if len(held) >= _MOST_BYTES:
            lines, held = [*lines, held], b""
        yield lines
    if held:
        yield [held]
