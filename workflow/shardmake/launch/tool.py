"""Other programs that are asked, and that may not answer."""

import subprocess


def hear(process: subprocess.Popen[str], seconds: float) -> str | None:
    """What ``process`` prints to its end with status 0, within ``seconds``; else None.

    One that is late is killed and not waited for: a process that the kernel holds (state D) does not die.
    """
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return None
    return printed if process.returncode == 0 else None
