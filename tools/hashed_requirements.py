"""Print requirements with the hash of every package: ``python -m tools.hashed_requirements [EXTRA ...]``.

``constraints.txt`` cannot have hashes, because pip then demands them of the editable install as well. This program
lets pip resolve the pins for this machine, its Python and its package index, without installing anything, and prints
what pip would install and the SHA-256 of each file. ``CONTRIBUTING.md`` says how to install from the result.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def resolve(project: Path, constraints: Path, extras: Sequence[str] = ()) -> dict[str, Any]:
    """Return pip's report on what it would install for ``project`` into an empty environment.

    Raises `subprocess.CalledProcessError` if pip finds no solution; pip prints why.
    """
    what = f"{project}[{','.join(extras)}]" if extras else str(project)
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--dry-run", "--ignore-installed", "--quiet", "--report", str(report), "-c", str(constraints)]
        command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", *options, what]
        subprocess.run(command, check=True)
        return json.loads(report.read_text())


def hashed(report: dict[str, Any]) -> str:
    """Return the packages of pip's report as requirements with hashes; the project itself is left out."""
    lines = []
    for item in report["install"]:
        archive = item["download_info"].get("archive_info")
        if archive is not None:
            name, version = item["metadata"]["name"], item["metadata"]["version"]
            lines.append(f"{name}=={version} --hash=sha256:{archive['hashes']['sha256']}\n")
    return "".join(sorted(lines, key=str.lower))


if __name__ == "__main__":
    print(hashed(resolve(REPOSITORY, REPOSITORY / "constraints.txt", sys.argv[1:])), end="")
