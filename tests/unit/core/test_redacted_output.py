"""The output of ranks, their children and services has no secrets, nor has a traceback at the end, and stops nobody."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardmake.core.secrets import LogCopy, RedactedStream
from tests.workflow.checkout import wait_for

TOKEN = "hf_Wq3TfEaYk2MdL9xPzRbNcUvHs"
PASSWORD = "Plant82-by-value"


def test_a_stream_is_its_inner_stream_without_secrets() -> None:
    inner = io.StringIO()
    stream = RedactedStream(inner)
    print("a", TOKEN, file=stream)
    stream.writelines([TOKEN, "b\n"])
    assert stream.write(TOKEN) == len(TOKEN)
    assert inner.getvalue() == "a [removed]\n[removed]b\n[removed]" and stream.closed is False


@pytest.mark.parametrize("program", [
    f"raise ValueError('{TOKEN}')", f"import atexit; atexit.register(print, '{TOKEN}')", f"import sys; sys.exit('{TOKEN}')",
])  # fmt: skip
def test_a_process_prints_no_secret_until_its_end(program: str) -> None:
    start = "from shardmake.core.secrets import redact_output; redact_output()"
    done = subprocess.run([sys.executable, "-c", f"{start}\n{program}"], capture_output=True, text=True)
    assert TOKEN not in done.stdout + done.stderr and "[removed]" in done.stdout + done.stderr


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "node-0.log"


def start(program: str, log: Path) -> tuple[subprocess.Popen[bytes], LogCopy]:
    environment, command = {**os.environ, "STORE_PASSWORD": PASSWORD}, [sys.executable, "-uc", program]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return process, LogCopy(process, log, environment)


def run(program: str, log: Path) -> str:
    process, output = start(program, log)
    process.wait(60)
    output.wait(10)
    return log.read_text()


def test_children_and_parts_of_a_line_show_no_secret(log: Path) -> None:
    """The password is only in the environment of the program, as a variable of the cluster file."""
    program = f"""
import os, sys, time
os.system("echo by shape {TOKEN}; printf 'by value %s\\r' $STORE_PASSWORD >&2")
sys.stdout.write("in parts {TOKEN[:9]}"); time.sleep(0.1); print("{TOKEN[9:]} ends")
"""
    text = run(program, log)
    assert TOKEN[9:] not in text and PASSWORD not in text
    assert "by shape [removed]\n" in text and "by value [removed]" in text and "in parts [removed] ends\n" in text


def test_the_last_line_of_a_killed_program_is_kept(log: Path) -> None:
    text = run(f"import os; os.write(1, b'before {TOKEN}'); os.kill(os.getpid(), 9)", log)
    assert text == "before [removed]"


def test_other_bytes_and_long_lines_pass(log: Path) -> None:
    text = run("import os; os.write(1, b'caf\\xe9\\n'); print('x' * 300_000); print('end')", log)
    assert text.startswith("caf\ufffd\n") and text.endswith("x\nend\n") and text.count("x") == 300_000


def test_a_line_without_an_end_appears_while_the_program_waits(log: Path) -> None:
    process, output = start("import time; print('loading ...', end=''); time.sleep(600)", log)
    wait_for(lambda: log.read_text() == "loading ...", 60)
    process.kill()
    output.wait(10)


def test_a_full_disk_stops_no_program() -> None:
    process, output = start("print(('y' * 99 + '\\n') * 20_000)", Path("/dev/full"))
    assert process.wait(60) == 0
    output.wait(10)


def test_a_program_that_stays_behind_does_not_delay_the_end(log: Path) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    process, output = start(program, log)
    assert process.wait(60) == 0
    output.wait(0.5)
    pid = int(log.read_text())
    os.kill(pid, signal.SIGTERM)
    output.wait(10)
