"""Questions to nvidia-smi, which can be missing, fail, or hang with the driver."""

import subprocess

from shardmake.core.process import wait_for_output

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
