"""Shell scripts that stand for the programs of a cluster."""

from pathlib import Path

import pytest


def write_program(program: Path, script: str = "exit 0") -> None:
    """Write a script, of the shell if it does not name another program."""
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"{script}\n" if script.startswith(("#!", "\x7f")) else f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def install_programs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str], path: str = "/usr/bin:/bin"
) -> None:
    """Put scripts on the PATH in front of other programs."""
    for name, script in programs.items():
        write_program(folder / name, script)
    monkeypatch.setenv("PATH", f"{folder}:{path}")


def count_calls(folder: Path) -> int:
    """Return how often the squeue of the fixture `slurm` ran."""
    return len((folder / "calls").read_text().splitlines())
