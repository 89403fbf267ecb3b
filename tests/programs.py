"""Shell scripts that stand for the programs of a cluster."""

from collections.abc import Mapping
from pathlib import Path

import pytest


def install_programs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, programs: Mapping[str, str], path: str = "/usr/bin:/bin"
) -> None:
    """Put scripts, of the shell if they do not name another program, on the PATH in front of other programs."""
    folder.mkdir(exist_ok=True)
    for name, script in programs.items():
        program = folder / name
        program.write_text(f"{script}\n" if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{path}")


def count_calls(folder: Path) -> int:
    """Return how often the squeue of the fixture `slurm` ran."""
    return len((folder / "calls").read_text().splitlines())
