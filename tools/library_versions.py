"""Put other versions of libraries into FOLDER: ``python -m tools.library_versions FOLDER oldest|newest|NAME==VERSION``.

With FOLDER in ``PYTHONPATH``, the environment has these versions, and its own of everything else. ``oldest`` are the
versions that pyproject.toml requires at least, each with its last fix; ``newest`` are those that pip finds now. More
than one NAME can follow. The Python package index has torch for CUDA only; that build runs without a GPU, too.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

from shardmake.core.private_names import SUPPORTED
from tools.install_torch import CONSTRAINTS


def requirements(wanted: Sequence[str]) -> list[str]:
    """Return what pip installs."""
    if list(wanted) not in (["newest"], ["oldest"]):
        return list(wanted)
    project = tomllib.loads(CONSTRAINTS.with_name("pyproject.toml").read_text())["project"]
    bounded = [one for one in map(Requirement, project["dependencies"]) if one.specifier]
    if list(wanted) == ["newest"]:
        return [str(one) for one in bounded]
    lower = ((one.name, bound.version) for one in bounded for bound in one.specifier if bound.operator == ">=")
    return [f"{name}=={version}.*" for name, version in lower]


def other_pins(constraints: str, wanted: Sequence[str]) -> Iterator[str]:
    """Yield the pins of the libraries that are not ``wanted`` and do not belong to a build of torch."""
    names = {Requirement(text).name for text in wanted}
    for line in constraints.splitlines():
        name = line.partition("==")[0]
        if name not in names and not re.match("nvidia|cuda|triton", name):
            yield line


def main(folder: str, *wanted: str) -> None:
    """Install the libraries into ``folder`` and print what it has."""
    needed = requirements(wanted)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        if "newest" not in wanted:
            pins.write("\n".join(other_pins(CONSTRAINTS.read_text(), needed)))
            pins.flush()
        options = ["-q", "--upgrade", "--target", folder, "-c", pins.name]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *needed], check=True)
    sys.path.insert(0, str(Path(folder).resolve()))
    print(*(f"{name} {version(name)}" for name in SUPPORTED))


if __name__ == "__main__":
    main(*sys.argv[1:])
