"""The output of a rank has no secrets, nor has the traceback that Python writes at its end."""

import io
import subprocess
import sys

import pytest

from shardmake.core.secrets import RedactedStream

TOKEN = "hf_Wq3TfEaYk2MdL9xPzRbNcUvHs"


def test_a_stream_is_its_inner_stream_without_secrets() -> None:
    inner = io.StringIO()
    stream = RedactedStream(inner)
    print("a", TOKEN, file=stream)
    stream.writelines([TOKEN, "b\n"])
    assert stream.write(TOKEN) == len(TOKEN)
    assert inner.getvalue() == "a [removed]\n[removed]b\n[removed]" and stream.closed is False


@pytest.mark.parametrize(
    "program",
    [
        f"raise ValueError('{TOKEN}')",
        f"import atexit; atexit.register(print, '{TOKEN}')",
        f"import sys; sys.exit('{TOKEN}')",
    ],
)
def test_a_process_prints_no_secret_until_its_end(program: str) -> None:
    start = "from shardmake.core.secrets import redact_output; redact_output()"
    done = subprocess.run([sys.executable, "-c", f"{start}\n{program}"], capture_output=True, text=True)
    assert TOKEN not in done.stdout + done.stderr and "[removed]" in done.stdout + done.stderr
