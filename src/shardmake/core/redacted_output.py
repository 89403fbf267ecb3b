"""Remove secrets from what a command or a rank prints, before it reaches a terminal or a log that others can read."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from shardmake.core.secrets import redact


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
