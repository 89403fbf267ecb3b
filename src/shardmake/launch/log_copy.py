"""Copy what programs print to the log of their node, which others may read, without its secrets."""

import contextlib
import os
import re
import select
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from shardmake.core.secrets import known_secrets, redact

_IDLE_SECONDS = 1.0
"""How long the beginning of a line waits for the rest, which may be the rest of a secret."""
_MOST_BYTES = 1 << 16
_END_SECONDS = 2.0
_LINE_ENDS = re.compile(rb"(?<=[\r\n])")


class LogCopy:
    """A thread that appends the ``output`` of programs to ``log`` without the secrets of their ``environment``.

    It ends when all of them have ended.

    The programs never wait for the log: what a full disk does not take is lost.
    """

    def __init__(self, output: IO[bytes], log: Path, environment: Mapping[str, str]) -> None:
        self._output = output
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
