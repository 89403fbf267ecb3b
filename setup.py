"""Add the workflow, its profiles and the examples to a wheel, in the folder ``project`` of the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PROJECT = ("Snakefile", "workflow", "profiles", "config", "examples", "constraints.txt")


class BuildWithProject(build_py):
    """The build of a wheel or of an installed folder; an editable installation has the checkout."""

    def run(self) -> None:
        """Copy the package, and what stands beside it."""
        super().run()
        target = Path(self.build_lib, "shardmake/project")
        for name in () if self.editable_mode else PROJECT:
            target.mkdir(parents=True, exist_ok=True)
            if Path(name).is_dir():
                shutil.copytree(name, target / name, dirs_exist_ok=True)
            else:
                shutil.copy(name, target)


setup(cmdclass={"build_py": BuildWithProject})
