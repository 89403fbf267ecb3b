"""Programs that answer, fail or hang."""

import subprocess
import time

from shardmake.core.process import wait_for_output


def ask(script: str, seconds: float = 10) -> str | None:
    return wait_for_output(subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True), seconds)


def test_what_a_program_says_counts_if_it_ends_well() -> None:
    assert ask("echo 4 GPUs") == "4 GPUs\n"
    assert ask("echo 4 GPUs; exit 9") is None


def test_a_program_that_cannot_be_killed_holds_nobody_up() -> None:
    """As one in a call to a broken driver: it gets the signal, and stays."""
    process = subprocess.Popen(["sleep", "5"], stdout=subprocess.PIPE, text=True)
    killed: list[bool] = []
    process.kill = lambda: killed.append(True)  # type: ignore[method-assign]
    started = time.monotonic()
    assert wait_for_output(process, 0.2) is None
    assert killed and time.monotonic() - started < 3
    process.terminate()
    process.communicate()
