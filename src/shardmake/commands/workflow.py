"""The workflow that comes with Shardmake: ``shardmake run``, and what ``snakemake`` needs in a folder."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from shardmake.config.invocation import config_options, refuse_config_options
from shardmake.config.load import load_cluster, load_config
from shardmake.core.environment import PROJECT

SNAKEFILES: Final = (Path("Snakefile"), Path("workflow/Snakefile"))
"""Places in which Snakemake looks for a workflow."""
DEFAULT_CONFIG: Final = "config/config.yaml"
_SNAKEFILE: Final = """\
# The workflow of the installed Shardmake. Add your own rules below.
from shardmake.core.environment import PROJECT


include: str(PROJECT / "workflow/Snakefile")


rule all:
    default_target: True
    input:
        rules.report.input,
"""
_IGNORED: Final = "/.snakemake/\n/compare/\n/compare.html\n/logs/\n/published/\n/resources/\n/runs/\n"
LOCAL_CLUSTER: Final = Path("config/clusters/local.yaml")
_COPIED: Final = (Path("profiles"), LOCAL_CLUSTER)


def has_workflow() -> bool:
    """Return whether Snakemake finds a workflow in this folder that names Shardmake, and not one of another kind."""
    found = next((path for path in SNAKEFILES if path.is_file()), None)
    return found is not None and "shardmake" in found.read_text(errors="replace").lower()


def write_project() -> None:
    """Write what ``snakemake --profile slurm`` needs into this folder; files that exist stay as they are."""
    for name, text in (("Snakefile", _SNAKEFILE), (".gitignore", _IGNORED)):
        if not Path(name).exists():
            Path(name).write_text(text)
    for source in (file for name in _COPIED for file in (PROJECT / name, *(PROJECT / name).rglob("*"))):
        target = source.relative_to(PROJECT)
        if source.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    if not Path("slurm").exists():
        Path("slurm").symlink_to("profiles/slurm")


def snakemake_arguments(words: Sequence[str], profile: str | None = None) -> list[str]:
    """Return Snakemake's arguments ``words`` with a workflow and ``profile``, by default that of the cluster file.

    What the folder lacks comes from the installed Shardmake.
    """
    refuse_config_options(words)
    given = config_options(words, "--profile", "--snakefile -s", "--directory -d")[0]
    found = [] if given.snakefile or has_workflow() else ["--snakefile", str(PROJECT / "Snakefile")]
    if not given.profile:
        folder = Path(given.directory or "")  # in which Snakemake reads all but --configfile
        files = [*map(Path, given.configfile)] or [folder / DEFAULT_CONFIG]
        named = [text.partition("=")[2] for text in given.config if text.startswith("cluster=")]
        profile = profile or load_cluster(folder / (named or [load_config(*files).cluster])[-1]).profile
        here = Path(profile).is_dir()
        found += ["--profile", profile if here else str(PROJECT / "profiles" / Path(profile).name)]
    return [*found, *words]
