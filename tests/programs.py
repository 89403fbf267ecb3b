"""Shell scripts that stand for the programs of a cluster."""

from collections.abc import Mapping
from pathlib import Path

import pytest


def install_programs(folder: Path, monkeypatch: pytest.MonkeyPatch, programs: Mapping[str, str]) -> None:
    """Put shell scripts on the PATH in front of the system's own programs."""
    folder.mkdir(exist_ok=True)
    for name, script in programs.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def count_calls(folder: Path) -> int:
    """Return how often the squeue of the fixture `slurm` ran."""
    return len((folder / "calls").read_text().splitlines())
